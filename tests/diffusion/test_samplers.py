"""Every sampler against distributions whose denoiser, and whose probability flow, are known in closed form."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from sampler_cases import MEAN, NAMES, PATH, PATHS, SAME, SOUND, STD, gaussian, noise_of, run, start, unchecked  # noqa: F401  a fixture

from uvit_decay.diffusion.prediction import T_EPS
from uvit_decay.diffusion.samplers import SAMPLERS


def marginal(t, path=PATH):
    """Mean and deviation of the noised Gaussian at t."""
    t = torch.tensor([t], dtype=torch.float64)
    return path.alpha(t) * MEAN, (path.alpha(t).square() * STD**2 + path.sigma(t).square()).sqrt()


def counted(denoise):
    """`denoise` and the list of times that it was called with."""
    times = []

    def call(x_t, t):
        assert t.shape == (len(x_t),)
        assert (t == t[0]).all()
        times.append(t[0].item())
        return denoise(x_t, t)

    return call, times


@pytest.mark.parametrize(("preset", "name"), SAME.items())
def test_a_preset_is_a_sampler_with_another_number_of_steps(preset, name):
    actual, expected = SAMPLERS[preset], SAMPLERS[name]
    assert actual.paper != expected.paper
    assert replace(actual, steps=expected.steps, paper=False) == expected


@pytest.mark.parametrize(("name", "path"), SOUND)
def test_each_state_has_the_noise_of_its_time(name, path):
    x = start((4, 1, 32, 32))
    for t, state in run(name, partial(gaussian, path=path), x, 100, path=path)[4::10]:
        mean, std = marginal(t, path)
        assert state.mean().item() == pytest.approx(mean.item(), abs=0.06), t
        assert state.std().item() == pytest.approx(std.item(), abs=0.06), t


@pytest.mark.parametrize("name", NAMES)
def test_stochastic_samplers_alone_add_noise_at_every_step_but_the_last(name):
    x, steps, drawn = start((2, 1, 4, 4)), 5, []

    def final(changed):
        """Return the sample, with other noise in step `changed`."""

        def noise(step):
            drawn.append(step)
            return noise_of(x, "other" if step == changed else "test")(step)

        return run(name, gaussian, x, steps, noise)[-1][1]

    samples = [final(changed) for changed in range(steps)]
    assert drawn == ([0, 1, 2, 3] * steps if SAMPLERS[name].stochastic else [])
    for one, other in itertools.combinations(samples, 2):
        assert not torch.allclose(one, other, atol=1e-3) if SAMPLERS[name].stochastic else torch.equal(one, other)


@pytest.mark.parametrize("steps", [1, 2, 3, 25, 61, 300])
@pytest.mark.parametrize("name", NAMES)
def test_a_trajectory_has_one_state_a_step_ends_at_zero_and_calls_the_network_as_often_as_promised(name, steps):
    (denoise, called), x = counted(gaussian), start((2, 1, 4, 4))
    before = x.clone()
    trajectory = run(name, denoise, x, steps)
    assert torch.equal(x, before)
    times = [t for t, _ in trajectory]
    assert len(times) == steps
    assert all(0 <= after < before for before, after in itertools.pairwise([1.0, *times]))
    assert times[-1] == 0.0
    for _, state in trajectory:
        assert state.shape == x.shape
        assert state.dtype == x.dtype
        assert state.isfinite().all()
    promised = SAMPLERS[name].nfe(steps)
    assert len(called) == promised if promised else 20 < len(called) < 200
    assert called[0] == 1.0
    assert min(called) >= (1e-4 if name == "uvit-dpm" else 0.999 * T_EPS)
    assert max(called) <= 1
