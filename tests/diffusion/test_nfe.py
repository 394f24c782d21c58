"""How often a network is evaluated, counted and promised, and what it costs."""

import pytest
import torch
from sampler_cases import NAMES
from small_source import NET, images, source

from uvit_decay.diffusion.sampling import Sampling, sampling_seconds
from uvit_decay.diffusion.wrappers import NFECounter


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_the_network_is_evaluated_as_often_as_promised(name, steps, guidance):
    calls = []

    def net(x, t, y):
        calls.append(len(x))
        return NET(x, t, y)

    sampling = Sampling(name, steps=steps, guidance=guidance)
    images(sampling, [0, 1], [0, 1], of=source(net))
    if sampling.nfe is None:
        assert set(calls) == {1 if guidance == 1 else 2}
        return
    assert calls == [2 if guidance == 1 else 4] * sampling.nfe
    twice = {"heun": 2 * steps - 1, "sit-ode": 2 * steps, "sit-sde-heun": 2 * steps - 1}
    assert sampling.nfe == twice.get(name, steps)


def test_counting_evaluations_changes_nothing():
    counted = NFECounter(NET)
    sampled = images(Sampling("sit-ode", 3, guidance=2.0), [0, 1], [0, 1], of=source(counted))
    assert counted.nfe == 2 * 2 * 6
    assert torch.equal(sampled, images(Sampling("sit-ode", 3, guidance=2.0), [0, 1], [0, 1]))
    counted = NFECounter(NET)
    images(Sampling("dopri5"), [0, 1], [0, 1], of=source(counted))
    assert 20 < counted.nfe / 2 < 400


def test_the_cost_is_that_of_the_batches_that_will_be_used():
    sizes = []

    def net(x, t, y):
        sizes.append(len(x))
        return NET(x, t, y)

    assert 0 < sampling_seconds(source(net), 10**5, 50) < 1000
    sampling_seconds(source(net), 700, 50)
    sampling_seconds(source(net), 1, 50)
    assert sizes == [50, 50, 7, 7, 1, 1], "a warm-up and the measurement, of at most 2 % of the work"
