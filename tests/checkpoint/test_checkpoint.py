"""Checkpoints: self-sufficient, exported without loss, and refused with one clear line where they are not ours."""

import pytest
import torch
from conftest import same, tiny_net
from official_files import described, redescribe
from safetensors.torch import save_file

from uvit_decay.checkpoint import load, read_training_checkpoint
from uvit_decay.checkpoint.convert import export_file
from uvit_decay.commands.sample import sample
from uvit_decay.runtime.errors import UserError
from uvit_decay.sampling_options import SamplingOptions


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
    assert (exported.card.weights, exported.card.step, exported.card.sampling, exported.path) == (
        weights,
        ours.card.step,
        ours.card.sampling,
        ours.path,
    )
    with pytest.raises(UserError, match=f"holds {weights} weights"):
        load(target, "raw" if weights == "ema" else "ema")


def truncated(path, tmp_path):
    target = tmp_path / f"short{path.suffix}"
    target.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return target


def foreign(path, tmp_path):
    torch.save({"model": {"weight": torch.zeros(2)}, "epoch": 3}, tmp_path / "foreign.ckpt")
    return tmp_path / "foreign.ckpt"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path, tmp_path: tmp_path, "is a folder"),
        (truncated, "truncated or not a checkpoint"),
        (foreign, "not written by this project"),
    ],
)
def test_a_bad_training_checkpoint_is_refused_in_one_line(trained, tmp_path, make, message):
    with pytest.raises(UserError, match=message):
        load(make(trained, tmp_path))


def test_a_bad_exported_checkpoint_is_refused_in_one_line(trained, tmp_path):
    target = tmp_path / "model.safetensors"
    export_file(trained, target)
    with pytest.raises(UserError, match="truncated or not a safetensors file"):
        load(truncated(target, tmp_path))
    save_file({"weight": torch.zeros(2)}, tmp_path / "plain.safetensors")
    with pytest.raises(UserError, match="not exported by this project"):
        load(tmp_path / "plain.safetensors")


def rewritten(trained, tmp_path, change):
    """An exported checkpoint whose card was changed."""
    target = tmp_path / "model.safetensors"
    export_file(trained, target)
    card = described(target)
    change(card)
    redescribe(target, **card)
    return target


@pytest.mark.parametrize("name", ["subprocess.Popen", "os.system", "uvit_decay.nn.embed.torch.nn.Linear"])
def test_a_class_from_elsewhere_is_not_built(trained, tmp_path, name):
    path = rewritten(trained, tmp_path, lambda d: d["net"].update(class_path=name, init_args={}))
    with pytest.raises(UserError, match="not part of uvit_decay|cannot be imported"):
        load(path)


@pytest.mark.parametrize(("part", "base"), [("net", "nn.UViT"), ("path", "diffusion.noise_path.VP")])
def test_a_trusted_class_is_built(trained, tmp_path, monkeypatch, part, base):
    (tmp_path / f"{part}_elsewhere.py").write_text(
        f"import uvit_decay.nn, uvit_decay.diffusion\n\nclass Mine(uvit_decay.{base}):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"{part}_elsewhere.Mine"
    path = rewritten(trained, tmp_path, lambda d: d[part].update(class_path=name))
    with pytest.raises(UserError, match=f"--trust {name}"):
        load(path)
    assert type(getattr(load(path, trusted=[name]), part)).__name__ == "Mine"
    sample(
        ckpt=path, num=1, out=tmp_path / "one.png", sampling=SamplingOptions(trust=[f"{part}_elsewhere"], device="cpu")
    )
    assert (tmp_path / "one.png").exists()


def test_weights_that_do_not_fit_their_card_are_refused(trained, tmp_path):
    with pytest.raises(UserError, match="do not fit the network"):
        load(rewritten(trained, tmp_path, lambda d: d["net"]["init_args"].update(dim=32)))
    with pytest.raises(UserError, match="trained with alphas"):
        load(rewritten(trained, tmp_path, lambda d: d["net"]["init_args"].update(alpha_min=0.6)))


def test_missing_ema_weights_are_said(trained, tmp_path):
    contents = read_training_checkpoint(trained)
    del contents["callbacks"]["EMA"]
    torch.save(contents, tmp_path / "raw.ckpt")
    assert load(tmp_path / "raw.ckpt").card.weights == "raw"
    with pytest.raises(UserError, match="no EMA weights"):
        load(tmp_path / "raw.ckpt", "ema")
