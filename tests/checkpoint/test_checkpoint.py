"""Checkpoints and their model cards: written and read by every format, of older versions too, refused if damaged."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import same, tiny_net
from official_files import change_training, import_and_load, read_description, redescribe, tiny
from refusals import raises_user_error
from safetensors.torch import load_file, save_file

from uvit_decay.checkpoint import ModelCard, load, read_training_checkpoint
from uvit_decay.checkpoint.convert import export_file
from uvit_decay.checkpoint.io import read
from uvit_decay.commands.sample import sample
from uvit_decay.diffusion.noise_path import VP
from uvit_decay.files.instantiate import Spec
from uvit_decay.generation.options import SamplingOptions
from uvit_decay.terminal.errors import UserError

NET, PATH, SAMPLING = ("net", "init_args"), ("path", "init_args"), ("sampling",)
DAMAGED = "model.safetensors", "damaged"


@pytest.fixture
def exported(trained, tmp_path):
    export_file(trained, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def change(path, place, value):
    """Change a value of the card, at this place inside the others."""
    inner = card = read_description(path)
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    redescribe(path, **card)


def test_a_checkpoint_gives_back_the_network_its_weights_and_its_sampling(trained):
    contents = torch.load(trained, weights_only=True)
    raw, ema = load(trained, "raw"), load(trained)
    assert (raw.card.weights, ema.card.weights, ema.card.step) == ("raw", "ema", 12)
    assert same(raw.net.state_dict(), {k.removeprefix("net."): v for k, v in contents["state_dict"].items()})
    assert same(dict(ema.net.named_parameters()), contents["callbacks"]["EMA"]["shadow"])
    assert not same(raw.net.state_dict(), ema.net.state_dict())
    assert ema.net.config == tiny_net().config
    assert (ema.card.sampling.steps, ema.card.sampling.guidance) == (4, 2.0)
    assert ema.card.class_names == tuple("0123456789")
    assert not ema.net.training


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_an_exported_checkpoint_is_the_same_network(trained, tmp_path, weights):
    target = tmp_path / "deep" / "model.safetensors"
    export_file(trained, target, weights)
    ours, exported = load(trained, weights), load(target)
    assert same(ours.net.state_dict(), exported.net.state_dict())
    assert (exported.card, exported.path) == (ours.card, ours.path)
    with raises_user_error(weights):
        load(target, "raw" if weights == "ema" else "ema")


def test_an_export_in_bfloat16_is_half_as_large_and_read_as_float32(trained, tmp_path):
    small, large = tmp_path / "small.safetensors", tmp_path / "large.safetensors"
    export_file(trained, small, dtype="bfloat16")
    export_file(trained, large)
    assert load_file(small)["mid_block.mlp.fc1.weight"].dtype == torch.bfloat16
    assert load_file(small)["alphas"].dtype == torch.float32
    rounded, exact = load(small).net.state_dict(), load(large).net.state_dict()
    assert {value.dtype for value in rounded.values()} == {torch.float32}
    assert torch.equal(rounded["alphas"], exact["alphas"])
    for name, value in exact.items():
        torch.testing.assert_close(rounded[name], value, rtol=2**-8, atol=0)
    with raises_user_error("`dtype`", "official.pth"):
        export_file(trained, tmp_path / "official.pth", dtype="bfloat16")


def test_bad_files_are_refused_in_one_line(trained, tmp_path):
    short, plain = tmp_path / "short.ckpt", tmp_path / "plain.safetensors"
    short.write_bytes(trained.read_bytes()[: trained.stat().st_size // 2])
    save_file({"weight": torch.zeros(2)}, plain)
    for path, message in (
        (short, (short, "truncated")),
        (tmp_path, (tmp_path, "folder", "last.ckpt")),
        (plain, (plain, "exported")),
    ):
        with raises_user_error(message):
            load(path)


def test_missing_ema_weights_are_said(trained, tmp_path):
    raw = change_training(trained, tmp_path, lambda contents: contents["callbacks"].pop("EMA"))
    assert load(raw).card.weights == "raw"
    with raises_user_error("EMA"):
        load(raw, "ema")


def test_a_card_is_the_same_after_a_file_of_either_format(trained, exported):
    values = read_training_checkpoint(trained)["uvit_decay"]
    card = ModelCard.from_dict(values, trained)
    assert (card.step, card.weighting, card.weights, card.noise_path()) == (12, "none", None, VP())
    assert ModelCard.from_dict(json.loads(json.dumps(card.to_dict())), "x") == card
    assert read(exported, None).card == replace(card, weights="ema") == read(trained, "ema").card
    assert ModelCard.from_dict(values | {"colour": "blue"}, "x") == card, "what is no field is ignored"


def test_an_imported_file_has_a_card_without_what_nobody_knows(tmp_path):
    import_and_load(tiny(), tmp_path)
    card = read(tmp_path / "ours.safetensors", None).card
    assert (card.weighting, card.class_hash, card.latents, card.weights) == (None, None, None, "ema")
    assert read_description(tmp_path / "ours.safetensors").keys().isdisjoint({"weighting", "class_hash", "latents"})


def test_a_card_of_an_encoder_has_no_path(trained):
    values = read_training_checkpoint(trained)["uvit_decay"]
    encoder = {name: value for name, value in values.items() if name not in ("path", "prediction", "sampling")}
    card = ModelCard.from_dict(encoder, "x")
    assert (card.path, card.prediction, card.sampling, card.noise_path()) == (None, None, None, None)
    assert ModelCard.from_dict(card.to_dict(), "x") == card
    assert card.to_dict().keys().isdisjoint({"path", "prediction", "sampling"})


def test_arguments_that_a_card_leaves_out_have_their_defaults(exported, tmp_path):
    card = read_description(exported)
    for name in ("schedule", "index"):
        del card["net"]["init_args"][name]
    redescribe(exported, **card)
    assert same(load(exported).net.state_dict(), load_file(exported))
    assert load(exported).net.config["schedule"] == "linear"


@pytest.mark.parametrize(("part", "base"), [("net", "nn.UViT"), ("path", "diffusion.noise_path.VP")])
def test_a_trusted_class_is_built(exported, tmp_path, monkeypatch, part, base):
    module = f"{part}_elsewhere"
    (tmp_path / f"{module}.py").write_text(
        f"import uvit_decay.nn, uvit_decay.diffusion\n\nclass Mine(uvit_decay.{base}):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    change(exported, (part, "class_path"), f"{module}.Mine")
    with raises_user_error(f"--trust {module}.Mine"):
        load(exported)
    with raises_user_error("`trusted`"):  # a str is not read as a sequence of letters
        load(exported, trusted=f"{module}.Mine")
    assert type(getattr(load(exported, trusted=[f"{module}.Mine"]), part)).__name__ == "Mine"
    sample(ckpt=exported, num=1, out=tmp_path / "one.png", sampling=SamplingOptions(trust=[module], device="cpu"))
    assert (tmp_path / "one.png").exists()


CARDS = {
    "newer": (("version",), 2, (*DAMAGED, 2, 1)),
    "depth": ((*NET, "depth"), 10**12, ("depth", 1, 1000)),
    "dim": ((*NET, "dim"), 32, "fit the network"),
    "decay": ((*NET, "alpha_min"), 0.6, "alphas"),
    "kind": ((*NET, "schedule"), "steep", ("schedule", "'steep'", "linear", "--trust")),
    "unknown": ((*NET, "dimm"), 3, "dimm"),
    "block": (("net", "class_path"), "uvit_decay.nn.layers.Mlp", "uvit_decay.nn.layers.Mlp"),
    "program": (("net",), {"class_path": "subprocess.Popen", "init_args": {}}, "subprocess.Popen"),
    "through": (
        ("net",),
        {"class_path": "uvit_decay.nn.embed.torch.nn.Linear", "init_args": {}},
        "uvit_decay.nn.embed.torch.nn.Linear",
    ),
    "betas": ((*PATH, "beta_max"), 0.0, ("VP", "0 < beta_min <= beta_max")),
    "prediction": (("prediction",), "epss", ("prediction", "eps", "x", "velocity", "score", "'epss'")),
    "sampler": ((*SAMPLING, "sampler"), "magic", ("sampler", "'magic'", "dpm++", "--trust")),
    "guidance": ((*SAMPLING, "guidance"), float("nan"), "guidance"),
    "latents": (("latents",), {"vae": "x"}, "latents"),
}


@pytest.mark.parametrize(("place", "value", "message"), CARDS.values(), ids=CARDS)
def test_a_card_that_is_not_true_is_refused_before_anything_is_built(exported, place, value, message):
    change(exported, place, value)
    with raises_user_error(message):
        load(exported)


def test_weights_that_do_not_fit_their_card_are_not_exported(exported, tmp_path):
    change(exported, (*NET, "dim"), 32)
    with raises_user_error(16, 32):
        export_file(exported, tmp_path / "official.pth")


@pytest.mark.parametrize("text", ["[]", "{", "[" * 10**5])
def test_what_is_no_card_is_refused(exported, text):
    save_file(load_file(exported), exported, {"uvit_decay": text})
    with raises_user_error(exported):
        load(exported)


@pytest.mark.parametrize("entry", ["state_dict", "callbacks", "uvit_decay"])
@pytest.mark.parametrize("value", [None, [], {"EMA": 1}, {3: 4}, {"EMA": {"shadow": {"norm.bias": 1}}}])
def test_a_training_checkpoint_of_other_contents_is_refused(trained, tmp_path, entry, value):
    path = change_training(trained, tmp_path, lambda c: c.update({entry: value}))
    with pytest.raises(UserError):
        load(path)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"net": Spec("uvit_decay.nn.uvit.UViT", {"dim": 8.5})}, ("dim", "int", "8.5")),
        ({"net": Spec("mine.Net", {"sizes": {1, 2}})}, ("set",)),
        ({"prediction": "v"}, ("prediction", "'v'")),
        ({"path": Spec("uvit_decay.diffusion.noise_path.VP", {"beta_min": "a"})}, ("beta_min", "float", "'a'")),
    ],
)
def test_a_card_that_could_not_be_read_back_is_refused_when_it_is_written(trained, changes, fragments):
    card = load(trained).card
    assert ModelCard.from_dict(card.to_dict(), "it") == card
    with raises_user_error("could not be read back", *fragments):
        replace(card, **changes).to_dict()
