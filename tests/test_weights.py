"""Which of several averages: its name, what is loaded, sampled, judged and exported, and what results call it."""

import json

import pytest
import torch
from conftest import same, tiny_task, tiny_trainer
from official_files import saved
from sample_script import pixels, sample

from uvit_decay.callbacks import EMA
from uvit_decay.checkpoint import load
from uvit_decay.commands.convert import main
from uvit_decay.data import Digits
from uvit_decay.representations.networks import open_network
from uvit_decay.runtime.errors import UserError
from uvit_decay.samples import Samples
from uvit_decay.sampling_options import LoadingOptions, SamplingOptions, WeightSet, slug
from uvit_decay.tasks.resume import check

HALF = WeightSet("ema:0.3")


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A .ckpt with averages of the decays .9 and .3."""
    folder = tmp_path_factory.mktemp("several")
    tiny_trainer(folder, EMA(0.9, extra_decays=[0.3]), max_steps=8).fit(tiny_task(), Digits(32))
    return folder / "checkpoints" / "last.ckpt"


def weights_of(found):
    return dict(found.net.named_parameters())


@pytest.mark.parametrize(
    ("text", "name"), [("ema", "ema"), ("raw", "raw"), ("ema:0.999", "ema:0.999"), ("ema:.9990", "ema:0.999")]
)
def test_a_name_is_that_of_its_number(text, name):
    assert WeightSet(text) == name
    assert slug(WeightSet(WeightSet(text))) == name.replace(":", "-")


@pytest.mark.parametrize("text", ["", "best", "ema:", "ema:1", "ema:-0.1", "ema:nan", "ema:x", "raw:0.3", "EMA"])
def test_another_name_is_refused_in_one_line(text):
    with pytest.raises(UserError, match="weights must be ema or raw, or ema:DECAY of an average, as ema:0.999; got"):
        WeightSet(text)


def test_each_set_is_loaded_by_its_name(several):
    contents = torch.load(several, weights_only=True)
    state = contents["callbacks"]["EMA"]
    first, half = load(several), load(several, HALF)
    assert (first.card.weights, half.card.weights, load(several, "ema").card.weights) == ("ema", "ema:0.3", "ema")
    assert same(weights_of(first), state["shadow"])
    assert same(weights_of(load(several, WeightSet("ema:0.9"))), state["shadow"])
    assert same(weights_of(half), state["extra"]["0.3"]["shadow"])
    assert not same(weights_of(half), weights_of(first))
    assert torch.equal(half.net.alphas, contents["state_dict"]["net.alphas"])


def test_a_decay_that_the_file_lacks_is_one_line_with_those_that_it_has(several, trained, tmp_path):
    with pytest.raises(UserError, match=r"holds no ema:0.99 weights: it has ema, ema:0.9, ema:0.3 and raw$"):
        load(several, WeightSet("ema:0.99"))
    with pytest.raises(UserError, match=r"last.ckpt holds no ema:0.9 weights: it has ema and raw$"):
        load(trained, WeightSet("ema:0.9"))  # one average, of a decay that it does not name
    contents = torch.load(trained, weights_only=True)
    del contents["callbacks"]["EMA"]
    with pytest.raises(UserError, match="holds no EMA weights: its run had no EMA callback"):
        load(saved(contents, tmp_path / "raw.ckpt"), WeightSet("ema:0.9"))


def test_an_exported_average_keeps_its_name(several, tmp_path, capsys):
    target = tmp_path / "half.safetensors"
    main(["export", str(several), str(target), "--weights", "ema:0.30"])
    assert f"wrote {target}" in capsys.readouterr().out
    exported = load(target)
    assert exported.card.weights == "ema:0.3"
    assert same(weights_of(exported), weights_of(load(several, HALF)))
    with pytest.raises(UserError, match="half.safetensors holds ema:0.3 weights, not ema$"):
        load(target, "ema")


def test_samples_are_named_after_their_average(several, tmp_path, monkeypatch, capsys):
    args = ["--ckpt", several, "--num", 2, "--steps", 2]
    for name in ("ema", "ema:0.9", "ema:0.3"):
        sample(monkeypatch, tmp_path, *args, "--weights", name, "--out", f"{name[-3:]}.npz")
    images = {name: pixels(tmp_path / f"{name}.npz") for name in ("ema", "0.9", "0.3")}
    assert (images["ema"] == images["0.9"]).all()
    assert (images["ema"] != images["0.3"]).any()
    samples = Samples.from_options(several, SamplingOptions(weights=HALF))
    assert samples.name.startswith("ema-0.3_")
    assert json.loads(json.dumps(samples.metadata()))["weights"] == "ema:0.3"
    with pytest.raises(SystemExit) as stopped:
        sample(monkeypatch, tmp_path, *args, "--weights", "ema:0.99", "--out", "none.npz")
    assert stopped.value.code == 2
    assert "it has ema, ema:0.9, ema:0.3 and raw" in capsys.readouterr().err


def test_evaluations_of_features_choose_it_too(several):
    judged = open_network(several, LoadingOptions(weights=HALF))
    assert (judged.name, judged.about["weights"]) == ("last-step8-ema-0.3", "ema:0.3")
    assert same(weights_of(judged), weights_of(load(several, HALF)))


DAMAGE = {
    "extra of words": (lambda state: state.update(extra="x"), "EMA extra of .* must be dict"),
    "no decay": (lambda state: state["extra"].update(best=state["extra"].pop("0.3")), "an EMA decay 'best'"),
    "another writing": (lambda state: state["extra"].update({".3": state["extra"].pop("0.3")}), "an EMA decay '.3'"),
    "a large decay": (lambda state: state["extra"].update({"1e9": state["extra"].pop("0.3")}), "an EMA decay '1e9'"),
    "no weights": (lambda state: state["extra"]["0.3"].pop("shadow"), "EMA.*0.3"),
    "half": (lambda state: state["extra"]["0.3"]["shadow"].pop("norm.bias"), "missing.*norm.bias|norm.bias is missing"),
    "a first decay of words": (lambda state: state.update(decay="x"), "EMA.decay|EMA decay"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_averages_are_refused_in_one_line(several, tmp_path, name):
    change, message = DAMAGE[name]
    contents = torch.load(several, weights_only=True)
    change(contents["callbacks"]["EMA"])
    with pytest.raises(UserError, match=message):
        load(saved(contents, tmp_path / "damaged.ckpt"), HALF)
    with pytest.raises(UserError, match=message):
        check(contents, tiny_task(), tiny_trainer(tmp_path), "x")
