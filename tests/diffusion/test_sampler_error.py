"""Deterministic samplers err as little as their order says, on a known mixture."""

import importlib.util
from functools import cache

import pytest
from conftest import ROOT
from sampler_cases import unchecked  # noqa: F401  a fixture

from uvit_decay.diffusion.noise_path import SDDiscrete
from uvit_decay.diffusion.samplers import SAMPLERS

spec = importlib.util.spec_from_file_location("sampler_error", ROOT / "benchmarks" / "sampler_error.py")
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)

SOUND = [(name, path) for name in SAMPLERS for path in benchmark.PATHS if benchmark.sound(name, path)]
ORDERS = {"euler": (1, 0.12), "ddim": (1, 0.15), "heun": (2, 0.2), "sit-ode": (2, 0.2), "dpm++": (2, 0.7)}


@cache
def start(path, size):
    return benchmark.noise(path, size)


@cache
def reference(path, size):
    return benchmark.final("sit-ode", path, start(path, size), 500)


@pytest.mark.parametrize(
    ("name", "path"),
    # The drift of SD's schedule jumps at every level, where only Euler's order is to be had.
    [(name, path) for name, path in SOUND if name in ORDERS and (path != SDDiscrete() or name == "euler")],
)
def test_the_error_falls_with_the_steps_as_the_order_says(name, path):
    expected, within = ORDERS[name]
    actual = benchmark.errors(name, path, start(path, 12), reference(path, 12))
    assert benchmark.order(actual) == pytest.approx(expected, abs=within), actual
    assert actual[-1] < 0.02


@pytest.mark.parametrize("path", benchmark.PATHS)
def test_dopri5_is_within_its_tolerance(path):
    sample = benchmark.final("dopri5", path, start(path, 12), 1)
    assert benchmark.distance(sample, reference(path, 12)) < 2e-3
