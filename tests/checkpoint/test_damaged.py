"""Damaged and hostile checkpoints: one line, or nothing but what was written; never a traceback, an hour or 16 GB."""

import json
import random
import zipfile

import pytest
import torch
from conftest import same
from official_files import TINY, described, imported, redescribe, saved, tiny
from safetensors.torch import load_file, save_file

from uvit_decay.checkpoint import load, read_training_checkpoint
from uvit_decay.checkpoint.convert import export, import_official
from uvit_decay.runtime.errors import UserError


@pytest.fixture
def exported(trained, tmp_path):
    export(trained, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def flipped(path, target, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    target.write_bytes(content)
    return target


def changed_training(trained, tmp_path, change):
    """A copy of the .ckpt whose contents `change` has changed."""
    contents = torch.load(trained, weights_only=True)
    change(contents)
    return saved(contents, tmp_path / "changed.ckpt")


def shadow(contents):
    return contents["callbacks"]["EMA"]["shadow"]


def is_what_was_written(path, right):
    """Whether a damaged file loads as the `right` checkpoint; False where it is refused."""
    try:
        found = load(path)
    except UserError:
        return False
    assert same(found.net.state_dict(), right.net.state_dict()), "damage was not noticed"
    assert (found.sampling, found.path, found.step, found.net.config) == (
        right.sampling,
        right.path,
        right.step,
        right.net.config,
    )
    return True


@pytest.mark.parametrize("form", ["exported", "trained"])
def test_flipped_bits_are_noticed_or_change_nothing(exported, trained, tmp_path, form):
    path, right = {"exported": exported, "trained": trained}[form], load(trained)
    places = random.Random(0).sample(range(path.stat().st_size), 25)
    noticed = [not is_what_was_written(flipped(path, tmp_path / f"bad{path.suffix}", p), right) for p in places]
    assert sum(noticed) > (22 if form == "exported" else 3), "optimizer and raw weights are not read"


def place_of(path, tensor):
    """Where the bytes of a tensor are in a file."""
    return path.read_bytes().index(tensor.numpy().tobytes())


def test_a_flipped_bit_of_the_weights_that_are_used_is_noticed(trained, tmp_path):
    contents, bad = torch.load(trained, weights_only=True), tmp_path / "bad.ckpt"
    flipped(trained, bad, place_of(trained, shadow(contents)["norm.bias"]))
    with pytest.raises(UserError, match=r"bad.ckpt is damaged: its norm\.bias is not what was written"):
        load(bad)
    load(bad, "raw")
    with pytest.raises(UserError, match="cannot be read.*Bad CRC-32 for file .*/data/"):
        read_training_checkpoint(bad)
    with zipfile.ZipFile(trained) as archive:
        pickled = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    flipped(trained, bad, trained.read_bytes().index(pickled) + 50)
    with pytest.raises(UserError, match="Bad CRC-32 for file .*data.pkl"):
        load(bad)


@pytest.mark.parametrize("field", [6, 8, 26, 27, 30])
def test_a_damaged_header_of_a_record_is_refused_or_changes_nothing(trained, tmp_path, field):
    """Flags, method, length of the name, and the name; zipfile raises a different error for each."""
    with zipfile.ZipFile(trained) as archive:
        start = next(record.header_offset for record in archive.infolist() if "/data/" in record.filename)
    content = bytearray(trained.read_bytes())
    content[start + field] ^= 255
    (tmp_path / "bad.ckpt").write_bytes(content)
    try:
        found = read_training_checkpoint(tmp_path / "bad.ckpt")
    except UserError:
        return
    assert same(found["state_dict"], torch.load(trained, weights_only=True)["state_dict"])


def test_files_without_checksums_load(trained, exported, tmp_path):
    contents, old = torch.load(trained, weights_only=True), tmp_path / "old.safetensors"
    torch.serialization.set_crc32_options(False)
    try:
        bare = saved(contents, tmp_path / "bare.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    save_file(load_file(exported), old, {"uvit_decay": json.dumps(described(exported))})
    for path in (bare, old):
        assert same(load(path).net.state_dict(), load(trained).net.state_dict())
    read_training_checkpoint(bare)


def test_a_compressed_zip_is_refused_before_it_is_unpacked(trained, tmp_path):
    with (
        zipfile.ZipFile(trained) as old,
        zipfile.ZipFile(tmp_path / "bomb.ckpt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(UserError, match="bomb.ckpt cannot be read.*its .* is compressed"):
        load(tmp_path / "bomb.ckpt")


def test_an_imported_file_is_verified(tmp_path):
    path, target = saved(tiny(), tmp_path / "official.pth"), tmp_path / "ours.safetensors"
    flipped(path, tmp_path / "bad.pth", place_of(path, tiny()["pos_embed"]))
    with pytest.raises(UserError, match=r"bad.pth is damaged: its pos_embed is not what was written"):
        import_official(tmp_path / "bad.pth", target, None, TINY)
    assert not target.exists()


# ---- numbers that no network works with


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["pos_embed", "alphas"])
def test_weights_that_are_not_finite_are_refused_at_load_export_and_import(trained, tmp_path, name, value):
    path = changed_training(trained, tmp_path, lambda c: c["state_dict"][f"net.{name}"].view(-1)[:1].fill_(value))
    for read in (lambda: load(path, "raw"), lambda: export(path, tmp_path / "out.safetensors", "raw")):
        with pytest.raises(UserError, match=f"its {name} holds NaN or infinite values"):
            read()
    state = tiny() | {"alphas": torch.ones(10)}
    state[name].view(-1)[:1] = value
    with pytest.raises(UserError, match=f"its {name} holds NaN or infinite values"):
        imported(state, tmp_path)
    assert not (tmp_path / "out.safetensors").exists()


def test_average_weights_must_be_finite_and_complete(trained, tmp_path):
    bad = changed_training(trained, tmp_path, lambda c: shadow(c)["norm.bias"].fill_(torch.nan))
    with pytest.raises(UserError, match=r"its norm\.bias holds NaN"):
        load(bad)
    load(bad, "raw")
    partial = changed_training(trained, tmp_path, lambda c: shadow(c).pop("norm.bias"))
    for read in (load, lambda path: export(path, tmp_path / "out.safetensors")):
        with pytest.raises(UserError, match=r"1 of its EMA weights are missing, such as norm\.bias"):
            read(partial)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_weights_of_another_kind_are_not_cast(trained, tmp_path, dtype):
    def cast(contents):
        contents["state_dict"]["net.norm.bias"] = contents["state_dict"]["net.norm.bias"].to(dtype)

    path = changed_training(trained, tmp_path, cast)
    for read in (lambda: load(path, "raw"), lambda: export(path, tmp_path / "out.safetensors", "raw")):
        with pytest.raises(UserError, match=rf"its norm\.bias is of {dtype}, not of torch\.float32"):
            read()
    with pytest.raises(UserError, match=rf"its norm\.bias is of {dtype}"):
        imported(tiny() | {"norm.bias": torch.zeros(16, dtype=dtype)}, tmp_path)


def test_weights_of_half_precision_become_single(trained, tmp_path):
    def halve(contents):
        contents["state_dict"] = {name: value.bfloat16() for name, value in contents["state_dict"].items()}

    found = load(changed_training(trained, tmp_path, halve), "raw").net
    assert {value.dtype for value in found.state_dict().values()} == {torch.float32}
    assert all(p.requires_grad for p in found.parameters())


def test_a_tensor_larger_than_the_file_is_refused(trained, tmp_path):
    def enlarge(contents):
        contents["state_dict"]["net.norm.bias"] = torch.zeros(1).expand(10**12)

    with pytest.raises(UserError, match="larger than the file"):
        load(changed_training(trained, tmp_path, enlarge), "raw")


@pytest.mark.parametrize("value", [torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"), "text", None])
def test_what_is_no_plain_tensor_is_no_weight(trained, tmp_path, value):
    path = changed_training(trained, tmp_path, lambda c: c["state_dict"].update({"net.norm.bias": value}))
    with pytest.raises(UserError):
        load(path, "raw")


# ---- descriptions

NAN, INF = float("nan"), float("inf")
NET, PATH, SAMPLING = ("net", "init_args"), ("path", "init_args"), ("sampling",)
DESCRIPTIONS = {
    "depth": ((*NET, "depth"), 10**12, "describes a network of depth 1000000000000, its weights are"),
    "width": ((*NET, "dim"), 10**9, "describes a network of dim 1000000000"),
    "size": ((*NET, "image_size"), 10**5, "describes a network of image_size|do not fit|cannot be"),
    "classes": ((*NET, "num_classes"), 10**22, "describes a network of num_classes 10000000000000000000000"),
    "text": ((*NET, "depth"), "2", "depth must be int, it is '2'"),
    "list": ((*NET, "depth"), [2], "depth must be int"),
    "negative": ((*NET, "depth"), -2, "depth"),
    "zero-patch": ((*NET, "patch_size"), 0, "patch_size must be at least 1"),
    "nan": ((*NET, "mlp_ratio"), NAN, "mlp_ratio must be float"),
    "negative-ratio": ((*NET, "mlp_ratio"), -4.0, "cannot be|do not fit|mlp_ratio"),
    "infinite": ((*NET, "time_scale"), INF, "time_scale must be float"),
    "kind": ((*NET, "schedule"), "steep", "schedule must be linear or"),
    "unknown": ((*NET, "dimm"), 3, "as another version knew it"),
    "class": (("net", "class_path"), 3, "class_path must be str"),
    "no-class": (("net",), {}, "lacks class_path"),
    "no-net": (("net",), None, "net must be dict"),
    "block": (("net", "class_path"), "uvit_decay.nn.block.Mlp", "as another version knew it"),
    "beta": ((*PATH, "beta_min"), NAN, "beta_min must be float"),
    "betas": ((*PATH, "beta_max"), 0.0, "VP needs 0 < beta_min <= beta_max"),
    "discrete": (
        ("path",),
        {"class_path": "uvit_decay.diffusion.noise_path.SDDiscrete", "init_args": {"beta_end": 2.0}},
        "SDDiscrete needs 0 < beta_start <= beta_end < 1",
    ),
    "no-path": (("path", "class_path"), "uvit_decay.diffusion.noise_path.None", "cannot be imported"),
    "prediction": (("prediction",), "epss", "prediction must be eps or x or velocity or score, it is 'epss'"),
    "sampler": ((*SAMPLING, "sampler"), "magic", "unknown sampler"),
    "steps": ((*SAMPLING, "steps"), 2.5, "steps must be int"),
    "guidance": ((*SAMPLING, "guidance"), NAN, "guidance must be float"),
    "overflow": ((*SAMPLING, "guidance"), 1e300, "guidance must be a number from 0"),
    "interval": ((*SAMPLING, "guidance_interval"), [0.1], "guidance_interval must be"),
    "sde": ((*SAMPLING, "sde"), {"form": 3}, "form must be"),
    "field": ((*SAMPLING, "colour"), 1, "has the unknown field colour"),
    "names": (("class_names",), ["a"], "names 1 classes, its network has 10"),
    "names-text": (("class_names",), "0123456789", "class_names must be"),
    "names-kind": (("class_names",), list(range(10)), r"class_names\[0\] must be str"),
    "step": (("step",), "12", "step must be int"),
    "huge-step": (("step",), 10**30, "step must be int"),
    "weights": (("weights",), "best", "weights must be ema or raw"),
    "latents": (("latents",), {"vae": "x"}, "latents lacks"),
    "scale": (
        ("latents",),
        {"vae": "x", "sha256": "", "scale": 0.0, "shift": 0.0, "channels": 1, "factor": 8},
        "a latent space has positive scale",
    ),
    "channels": (
        ("latents",),
        {"vae": "x", "sha256": "", "scale": 1.0, "shift": 0.0, "channels": 4, "factor": 8},
        "describes latents of 4 channels, its network has 1",
    ),
}


@pytest.mark.parametrize(("place", "value", "message"), DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_a_description_that_is_not_true_is_refused_before_anything_is_built(exported, place, value, message):
    description = described(exported)
    inner = description
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    redescribe(exported, **description)
    with pytest.raises(UserError, match=message) as caught:
        load(exported)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{", "[" * 10**5, '{"net": ' * 90 + "1" + "}" * 90])
def test_a_description_that_is_no_description_is_refused(exported, text):
    save_file(load_file(exported), exported, {"uvit_decay": text})
    with pytest.raises(UserError) as caught:
        load(exported)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("entry", ["state_dict", "callbacks", "uvit_decay"])
@pytest.mark.parametrize("value", [None, 3, [], {"EMA": 1}, {3: 4}, {"EMA": {"shadow": {"norm.bias": 1}}}])
def test_a_training_checkpoint_of_other_contents_is_refused(trained, tmp_path, entry, value):
    path = changed_training(trained, tmp_path, lambda c: c.update({entry: value}))
    with pytest.raises(UserError) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_arguments_that_a_description_leaves_out_have_their_defaults(exported, tmp_path):
    description = described(exported)
    for name in ("schedule", "index"):
        del description["net"]["init_args"][name]
    redescribe(exported, **description)
    assert same(load(exported).net.state_dict(), load_file(exported))
    assert "alpha_min 0.7" in export(exported, tmp_path / "official.pth")


def test_a_description_that_grows_without_end_is_refused(trained, tmp_path):
    grown = ["x"]
    for _ in range(40):
        grown = [grown, grown]
    path = changed_training(trained, tmp_path, lambda c: c["uvit_decay"].update(more=grown))
    with pytest.raises(UserError, match="its model card holds more than names and plain values, or has no end"):
        load(path)


def test_a_description_of_more_than_plain_values_is_not_exported(trained, tmp_path):
    path = changed_training(trained, tmp_path, lambda c: c["uvit_decay"].update(pieces=torch.zeros(2)))
    with pytest.raises(UserError, match="its model card holds more than names and plain values"):
        export(path, tmp_path / "out.safetensors")
