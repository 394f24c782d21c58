"""Model cards that are damaged or hostile: one line, before anything is built."""

import pytest
import torch
from conftest import same
from official_files import changed_training, described, redescribe
from safetensors.torch import load_file, save_file

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.convert import export_file
from uvit_decay.runtime.errors import UserError


@pytest.fixture
def exported(trained, tmp_path):
    export_file(trained, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


NAN, INF = float("nan"), float("inf")
NET, PATH, SAMPLING = ("net", "init_args"), ("path", "init_args"), ("sampling",)
CARDS = {
    "depth": ((*NET, "depth"), 10**12, "describes a network of depth 1000000000000, its weights are"),
    "size": ((*NET, "image_size"), 10**5, "describes a network of image_size|do not fit|cannot be"),
    "text": ((*NET, "depth"), "2", "depth must be int, it is '2'"),
    "zero-patch": ((*NET, "patch_size"), 0, "patch_size must be at least 1"),
    "kind": ((*NET, "schedule"), "steep", "schedule must be linear or"),
    "unknown": ((*NET, "dimm"), 3, "as another version knew it"),
    "no-net": (("net",), None, "net must be dict"),
    "block": (("net", "class_path"), "uvit_decay.nn.block.Mlp", "as another version knew it"),
    "betas": ((*PATH, "beta_max"), 0.0, "VP needs 0 < beta_min <= beta_max"),
    "discrete": (
        ("path",),
        {"class_path": "uvit_decay.diffusion.noise_path.SDDiscrete", "init_args": {"beta_end": 2.0}},
        "SDDiscrete needs 0 < beta_start <= beta_end < 1",
    ),
    "no-path": (("path", "class_path"), "uvit_decay.diffusion.noise_path.None", "cannot be imported"),
    "prediction": (("prediction",), "epss", "prediction must be eps or x or velocity or score, it is 'epss'"),
    "sampler": ((*SAMPLING, "sampler"), "magic", "unknown sampler"),
    "guidance": ((*SAMPLING, "guidance"), NAN, "guidance must be float"),
    "overflow": ((*SAMPLING, "guidance"), 1e300, "guidance must be a number from 0"),
    "interval": ((*SAMPLING, "guidance_interval"), [0.1], "guidance_interval must be"),
    "sde": ((*SAMPLING, "sde"), {"form": 3}, "form must be"),
    "field": ((*SAMPLING, "colour"), 1, "has the unknown field colour"),
    "names": (("class_names",), ["a"], "names 1 classes, its network has 10"),
    "step": (("step",), "12", "step must be int"),
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


@pytest.mark.parametrize(("place", "value", "message"), CARDS.values(), ids=CARDS)
def test_a_card_that_is_not_true_is_refused_before_anything_is_built(exported, place, value, message):
    inner = card = described(exported)
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    redescribe(exported, **card)
    with pytest.raises(UserError, match=message):
        load(exported)


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{", "[" * 10**5, '{"net": ' * 90 + "1" + "}" * 90])
def test_what_is_no_card_is_refused(exported, text):
    save_file(load_file(exported), exported, {"uvit_decay": text})
    with pytest.raises(UserError):
        load(exported)


@pytest.mark.parametrize("entry", ["state_dict", "callbacks", "uvit_decay"])
@pytest.mark.parametrize("value", [None, 3, [], {"EMA": 1}, {3: 4}, {"EMA": {"shadow": {"norm.bias": 1}}}])
def test_a_training_checkpoint_of_other_contents_is_refused(trained, tmp_path, entry, value):
    path = changed_training(trained, tmp_path, lambda c: c.update({entry: value}))
    with pytest.raises(UserError):
        load(path)


def test_arguments_that_a_card_leaves_out_have_their_defaults(exported, tmp_path):
    card = described(exported)
    for name in ("schedule", "index"):
        del card["net"]["init_args"][name]
    redescribe(exported, **card)
    assert same(load(exported).net.state_dict(), load_file(exported))
    assert "alpha_min 0.7" in export_file(exported, tmp_path / "official.pth")


def test_a_card_that_grows_without_end_is_refused(trained, tmp_path):
    grown = ["x"]
    for _ in range(40):
        grown = [grown, grown]
    path = changed_training(trained, tmp_path, lambda c: c["uvit_decay"].update(more=grown))
    with pytest.raises(UserError, match="its model card holds more than names and plain values, or has no end"):
        load(path)


def test_a_card_of_more_than_plain_values_is_not_exported(trained, tmp_path):
    path = changed_training(trained, tmp_path, lambda c: c["uvit_decay"].update(pieces=torch.zeros(2)))
    with pytest.raises(UserError, match="its model card holds more than names and plain values"):
        export_file(path, tmp_path / "out.safetensors")
