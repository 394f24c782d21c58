"""Damaged checkpoints: one line, or nothing but what was written; never a traceback."""

import random
import struct
import zipfile

import pytest
import torch
from conftest import same
from official_files import TINY, change_training, import_and_load, save_contents, tiny
from refusals import raises_user_error

from uvit_decay.checkpoint import load, read_training_checkpoint
from uvit_decay.checkpoint.convert import export_file, import_official
from uvit_decay.terminal.errors import UserError


def flipped(path, target, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    target.write_bytes(content)
    return target


def shadow(contents):
    return contents["callbacks"]["EMA"]["shadow"]


def contents(path):
    """Yield the places of the bytes of each file in a zip, which lie behind its header."""
    stored = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            names = sum(struct.unpack_from("<HH", stored, info.header_offset + 26))  # lengths of name and padding
            begin = info.header_offset + 30 + names
            yield range(begin, begin + info.compress_size)


def test_flipped_bits_are_noticed_or_change_nothing(trained, tmp_path):
    right, noticed, read = load(trained), 0, list(contents(trained))
    for place in random.Random(0).sample(range(trained.stat().st_size), 50):
        try:
            found = load(flipped(trained, tmp_path / "bad.ckpt", place))
        except UserError:
            noticed += 1
        else:
            assert not any(place in part for part in read), "damage was not noticed"
            assert same(found.net.state_dict(), right.net.state_dict()), "damage was not noticed"
            assert (found.card, found.path, found.net.config) == (right.card, right.path, right.net.config)
    assert noticed > 22


def place_of(path, tensor):
    """Return the position of a tensor's bytes in a file."""
    return path.read_bytes().index(tensor.numpy().tobytes())


def test_a_flipped_bit_of_the_weights_that_are_used_is_noticed(trained, tmp_path):
    contents, bad = torch.load(trained, weights_only=True), tmp_path / "bad.ckpt"
    flipped(trained, bad, place_of(trained, shadow(contents)["norm.bias"]))
    for read in (load, read_training_checkpoint):
        with raises_user_error("bad.ckpt", "CRC-32", "/data/"):
            read(bad)
    with zipfile.ZipFile(trained) as archive:
        pickled = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    flipped(trained, bad, trained.read_bytes().index(pickled) + 50)
    with raises_user_error("CRC-32", "data.pkl"):
        load(bad)


def test_files_without_checksums_load(trained, tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        bare = save_contents(torch.load(trained, weights_only=True), tmp_path / "bare.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(load(bare).net.state_dict(), load(trained).net.state_dict())
    read_training_checkpoint(bare)


def test_records_of_one_size_in_one_anothers_places_are_refused(trained, tmp_path):
    """torch goes by the offsets in the central directory, whatever the names at these places."""
    content = bytearray(trained.read_bytes())
    with zipfile.ZipFile(trained) as archive:
        sizes = {}
        for record in archive.infolist():
            sizes.setdefault(record.file_size if "/data/" in record.filename else -1, []).append(record.filename)
        first, second = next(names for size, names in sizes.items() if size > 0 and len(names) > 1)[:2]
        entries = [content.rindex(name.encode(), archive.start_dir) - 4 for name in (first, second)]
    a, b = (slice(entry, entry + 4) for entry in entries)  # an offset is right before the name
    content[a], content[b] = content[b], content[a]
    (tmp_path / "bad.ckpt").write_bytes(content)
    with raises_user_error("bad.ckpt", "directory", "header"):
        load(tmp_path / "bad.ckpt")


def test_an_imported_file_is_verified(tmp_path):
    path, target = save_contents(tiny(), tmp_path / "official.pth"), tmp_path / "ours.safetensors"
    flipped(path, tmp_path / "bad.pth", place_of(path, tiny()["pos_embed"]))
    with raises_user_error("bad.pth", "CRC-32"):
        import_official(tmp_path / "bad.pth", target, None, TINY)
    assert not target.exists()


def filled(name, value):
    return lambda state: state[f"net.{name}"].view(-1)[:1].fill_(value)


def replaced(value, name="net.norm.bias"):
    return lambda state: state.update({name: value})


WEIGHTS = [
    (filled("pos_embed", torch.nan), ("pos_embed", "NaN")),
    (filled("alphas", torch.inf), ("alphas", "NaN")),
    (replaced(torch.zeros(16, dtype=torch.int64)), ("norm.bias", "torch.int64", "torch.float32")),
    (replaced("text"), "changed.ckpt"),
]


@pytest.mark.parametrize(("change", "message"), WEIGHTS)
def test_weights_that_no_network_works_with_are_refused(trained, tmp_path, change, message):
    path = change_training(trained, tmp_path, lambda contents: change(contents["state_dict"]))
    for use in (load, lambda path, weights: export_file(path, tmp_path / "out.safetensors", weights)):
        with raises_user_error(message):
            use(path, "raw")
    assert not (tmp_path / "out.safetensors").exists()


def test_weights_that_are_not_finite_are_not_imported(tmp_path):
    state = tiny()
    state["pos_embed"].view(-1)[:1] = torch.nan
    with raises_user_error("pos_embed", "NaN"):
        import_and_load(state, tmp_path)


def test_average_weights_must_be_finite_and_complete(trained, tmp_path):
    bad = change_training(trained, tmp_path, lambda c: shadow(c)["norm.bias"].fill_(torch.nan))
    with raises_user_error("norm.bias", "NaN"):
        load(bad)
    load(bad, "raw")
    partial = change_training(trained, tmp_path, lambda c: shadow(c).pop("norm.bias"))
    for read in (load, lambda path: export_file(path, tmp_path / "out.safetensors")):
        with raises_user_error(1, "EMA", "norm.bias"):
            read(partial)


def test_weights_of_half_precision_become_single(trained, tmp_path):
    def halve(contents):
        contents["state_dict"] = {name: value.bfloat16() for name, value in contents["state_dict"].items()}

    net = load(change_training(trained, tmp_path, halve), "raw").net
    assert {value.dtype for value in net.state_dict().values()} == {torch.float32}
    assert all(p.requires_grad for p in net.parameters())
