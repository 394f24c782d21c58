"""Tensor files: any damage is noticed, and files without checksums are read."""

import pytest
import torch
from refusals import raises_user_error
from safetensors.torch import save_file

from uvit_decay.files.tensor_files import load_tensors, load_weights, save_tensors
from uvit_decay.terminal.errors import UserError

TENSORS = {
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "transposed": torch.arange(6).reshape(2, 3).T,
    "half": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "flags": torch.tensor([True, False]),
}


@pytest.fixture
def path(tmp_path):
    save_tensors(tmp_path / "x.safetensors", TENSORS, {"about": "café"})
    return tmp_path / "x.safetensors"


def test_what_was_saved_comes_back(path):
    metadata, tensors = load_tensors(path)
    assert metadata == {"about": "café"}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())
    assert {name: value.dtype for name, value in tensors.items()} == {n: v.dtype for n, v in TENSORS.items()}


def test_every_flipped_bit_is_noticed_or_changes_nothing(path):
    content = path.read_bytes()
    for place in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            metadata, tensors = load_tensors(path)
        except UserError:
            continue
        assert metadata == {"about": "café"}, place
        assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items()), place


def test_a_truncated_file_is_refused(path):
    content = path.read_bytes()
    for kept in (0, 4, 8, 100, -1):
        path.write_bytes(content[:kept])
        with raises_user_error("safetensors"):
            load_tensors(path)


def test_the_header_is_verified_even_where_tensors_are_not(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    load_tensors(path, verify=False)
    with raises_user_error("damaged", "CRC-32"):
        load_tensors(path)
    path.write_bytes(content.replace(b"half", b"hall"))
    with raises_user_error("damaged", "CRC-32"):
        load_tensors(path, verify=False)


def test_a_file_without_checksums_is_read(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "old.safetensors", {"a": "b"})
    metadata, tensors = load_tensors(tmp_path / "old.safetensors")
    assert (metadata, tensors["x"].tolist()) == ({"a": "b"}, [1.0, 1.0])


def test_the_same_contents_are_the_same_bytes(tmp_path):
    """safetensors itself writes metadata in a random order."""
    metadata = {str(i): "é" * i for i in range(12)}
    for name, given in (("a", metadata), ("b", dict(reversed(metadata.items())))):
        save_tensors(tmp_path / name, {"x": torch.arange(3.0), "y": torch.ones(2, dtype=torch.int64)}, given)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert load_tensors(tmp_path / "a")[0] == metadata


def test_weights_may_share_memory(tmp_path):
    weight = torch.arange(12.0).reshape(3, 4)
    torch.save({"a": weight, "tied": weight, "first": weight[:2]}, tmp_path / "x.pth")
    loaded = load_weights(tmp_path / "x.pth", "weights")
    assert torch.equal(loaded["a"], weight)
    assert torch.equal(loaded["tied"], weight)
    assert torch.equal(loaded["first"], weight[:2])
