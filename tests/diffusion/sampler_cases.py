"""The samplers of any denoiser, which differ in more than their default number of steps, their paths, a denoiser."""

import jaxtyping
import pytest
import torch

from uvit_decay.diffusion.denoiser import Denoiser
from uvit_decay.diffusion.noise_path import GVP, VP, Linear, SDDiscrete, expand
from uvit_decay.diffusion.samplers import SAMPLERS
from uvit_decay.runtime.random import normal
from uvit_decay.terminal.errors import UserError

PATHS = [VP(), SDDiscrete(), Linear(), GVP()]
SAME = {"uvit-em": "euler-maruyama"}  # but for its number of steps, and that it does not clip
NAMES = [name for name in SAMPLERS if name not in SAME and not SAMPLERS[name].learned_variance]


def sound(name, path):
    """Return whether the sampler supports the path."""
    try:
        SAMPLERS[name].check(path, name)
    except UserError:
        return False
    return True


SOUND = [(name, path) for name in NAMES for path in PATHS if sound(name, path)]


PATH = VP()
MEAN, STD = 0.3, 0.5


def start(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def noise_of(x, key="test", rows=None):
    """Return noise of each step for the batch x, whose samples have these numbers."""
    rows = torch.arange(len(x)) if rows is None else torch.tensor(rows)
    return lambda step: normal(key, step, rows=rows, shape=x.shape[1:])


def gaussian(x_t, t, path=PATH):
    """Return E[x | x_t] of independent pixels from N(MEAN, STD^2), and the corresponding noise, also at t = 0."""
    alpha, sigma = expand(path.alpha(t), x_t), expand(path.sigma(t), x_t)
    variance = alpha**2 * STD**2 + sigma**2
    offset = x_t - alpha * MEAN
    return MEAN + alpha * STD**2 / variance * offset, sigma / variance * offset


def run(name, denoise, x, steps, noise=None, path=PATH):
    return list(SAMPLERS[name].run(Denoiser(denoise, path), x, steps, noise or noise_of(x)))


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """No checks of shapes, which take half of the time of thousands of small steps; test_sampling.py keeps them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
