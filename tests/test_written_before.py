"""Files that version 0.1.0 wrote in November 2026 (commit 5cb78b9) load, and mean what they meant."""

import json
import shutil

import pytest
import torch
from conftest import ROOT, same, tiny_net, tiny_task, tiny_trainer
from official_files import saved

from uvit_decay.callbacks import EMA
from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.io import KEY
from uvit_decay.data import Digits
from uvit_decay.data.latents import manifest
from uvit_decay.data.latents.shards import LatentSet
from uvit_decay.diffusion.noise_path import Linear
from uvit_decay.nn import SiT
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.tensor_files import load_tensors, save_tensors

FILES = ROOT / "tests" / "written_before"
OUTPUTS = {  # every 40th number that the networks gave then for `inputs`
    ("uvit", "ema"): [0.13044403493, 0.02021548152, 0.00860203803, 0.40035995841],
    ("uvit", "raw"): [0.13467068970, 0.02346020937, 0.01426911354, 0.43466675282],
    ("sit", "ema"): [-0.01459769346, -0.01565173268, -0.00852304325, -0.00066784653],
    ("sit", "raw"): [-0.01729919948, -0.01852247678, -0.01015055738, -0.00098051038],
}


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.linspace(-1, 1, 128).reshape(2, 1, 8, 8), torch.tensor([0.2, 0.9]), torch.tensor([3, 10])


@pytest.mark.parametrize("name", ["uvit", "sit"])
@pytest.mark.parametrize(("ending", "weights"), [("ckpt", "ema"), ("ckpt", "raw"), ("safetensors", "ema")])
def test_checkpoints_are_the_same_networks(name, ending, weights):
    checkpoint = load(FILES / f"{name}.{ending}", weights)
    with torch.no_grad():
        out = checkpoint.net(*inputs()).flatten()[::40]
    assert torch.allclose(out, torch.tensor(OUTPUTS[name, weights]), rtol=1e-4, atol=1e-6)
    assert (checkpoint.card.step, checkpoint.card.class_names) == (5, tuple("0123456789"))
    sampling = checkpoint.card.sampling
    assert (sampling.sampler, sampling.steps, sampling.guidance) == ("dpm++", 4, 2.0)
    assert type(checkpoint.path).__name__ == {"uvit": "VP", "sit": "Linear"}[name]


@pytest.mark.parametrize("name", ["uvit", "sit"])
def test_training_goes_on_from_them(name, tmp_path):
    torch.manual_seed(0)
    if name == "sit":
        net = SiT(8, 2, 1, dim=16, depth=2, heads=2, num_classes=10, alpha_min=0.8, wiring="decayed")
        task = tiny_task(net, path=Linear(), prediction="velocity")
    else:
        task = tiny_task(tiny_net())
    trainer = tiny_trainer(tmp_path, EMA(0.9), max_steps=7)
    trainer.fit(task, Digits(32), ckpt_path=FILES / f"{name}.ckpt")
    assert trainer.global_step == 7
    paths = FILES / f"{name}.ckpt", tmp_path / "checkpoints" / "last.ckpt"
    before, after = (load(path, "raw").net.state_dict() for path in paths)
    changes = [(after[key] - before[key]).abs().max() for key in before]
    assert 0 < max(changes) < 0.01  # two steps at a rate of 1e-3


def test_of_several_averages_the_first_is_read_and_goes_on(tmp_path):
    contents = torch.load(FILES / "uvit.ckpt", weights_only=True)
    ema = contents["callbacks"]["EMA"]
    further = {name: torch.zeros_like(value) for name, value in ema["shadow"].items()}
    ema |= {"decay": 0.9, "extra": {"0.3": {"shadow": further, "updates": 5}}}
    several = saved(contents, tmp_path / "several.ckpt")
    assert same(dict(load(several).net.named_parameters()), ema["shadow"])
    with pytest.raises(UserError, match=r"several.ckpt holds ema weights, not ema:0.3$"):
        load(several, "ema:0.3")
    trainer = tiny_trainer(tmp_path, EMA(0.9), max_steps=6)
    trainer.fit(tiny_task(tiny_net()), Digits(32), ckpt_path=several)
    stored = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["callbacks"]["EMA"]
    assert (list(stored), stored["updates"]) == (["shadow", "updates"], 6)


def test_an_exported_average_of_another_decay_is_one_of_ema_weights(tmp_path):
    metadata, state = load_tensors(FILES / "uvit.safetensors")
    card = {**json.loads(metadata[KEY]), "weights": "ema:0.3"}
    save_tensors(tmp_path / "half.safetensors", state, {KEY: json.dumps(card)})
    assert load(tmp_path / "half.safetensors", "ema").card.weights == "ema"


def test_latents_hold_the_same_numbers(tmp_path):
    shutil.copytree(FILES / "latents", tmp_path / "latents")
    latents = LatentSet(tmp_path / "latents", manifest.read(tmp_path / "latents"))
    x, labels = latents[[0, 4, 5]]
    assert (x.shape, x.dtype) == ((3, 8, 4, 4), torch.float16)
    assert labels.tolist() == [0, 1, 1]
    assert float(x.double().sum()) == pytest.approx(40.03473687171936, rel=1e-12)
