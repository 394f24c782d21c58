"""Linear probes of several layers at once against torch's modules, trained one by one as the protocols' authors do."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from uvit_decay.representations.linear_probes import DDAE, IN100, REPA, accuracies
from uvit_decay.runtime.optimizers import LARS

CPU = torch.device("cpu")


def ddae(passed):
    """Return a bare linear layer, Adam and CosineAnnealingLR."""
    return 0.05 * (1 + math.cos(math.pi * int(passed) / 9)) / 2


def repa(passed):
    """MAE's warm-up and cosine, set at every step."""
    return 6.4 * (passed if passed < 1 else (1 + math.cos(math.pi * (passed - 1) / 8)) / 2)


def in100(passed):
    """Set the rate from the epoch that has just ended: the first two epochs have the full rate."""
    return 0.05 * (1 + math.cos(math.pi * max(int(passed) - 1, 0) / 9)) / 2


OPTIMIZERS = {ddae: torch.optim.Adam, repa: LARS, in100: torch.optim.AdamW}


def alone(probe, rate, passes, labels, test, test_labels):
    """Train one layer in a loop of its own, from the same start."""
    start, linear = probe.start(5, 3), nn.Linear(5, 3)
    linear.load_state_dict(start[-1].state_dict())
    model = nn.Sequential(nn.BatchNorm1d(5, eps=1e-6), linear) if rate is repa else linear
    optimizer = OPTIMIZERS[rate](model.parameters(), 1.0)
    for epoch in range(9):
        parts = probe.order(epoch, len(labels)).split(20)
        for step, part in enumerate(parts):
            if rate is not repa or len(part) > 1:
                optimizer.param_groups[0]["lr"] = rate(epoch + step / len(parts))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(passes[epoch][part]), labels[part]).backward()
                optimizer.step()
    return (model.eval()(test).argmax(dim=1) == test_labels).double().mean()


@pytest.mark.parametrize(
    ("probe", "rate", "least"),
    [(replace(DDAE, lr=0.05), ddae, 0.6), (REPA, repa, 0.35), (replace(IN100, lr=0.05), in100, 0.6)],
)
def test_layers_are_trained_as_if_each_were_alone_with_the_features_of_each_pass(probe, rate, least):
    random = torch.Generator().manual_seed(0)
    labels, test_labels = (torch.randint(3, (n,), generator=random) for n in (101, 60))
    centres = torch.randn(2, 3, 5, generator=random)
    noisy = lambda y: centres[:, y] + torch.randn(2, len(y), 5, generator=random)  # noqa: E731
    passes, test = [noisy(labels) for _ in range(9)], noisy(test_labels)
    probe = replace(probe, epochs=9, batch_size=20, seed=4)  # the last batch is of one image
    assert torch.equal(probe.order(0, 101).sort().values, torch.arange(101))
    asked = []
    train = lambda epoch: asked.append(epoch) or passes[epoch]  # noqa: E731
    with torch.no_grad():
        *_, models = probe.passes(train, labels, 3, CPU)
    assert asked == list(range(9))
    actual = accuracies(models, test, test_labels, CPU)
    for layer in range(2):
        expected = alone(probe, rate, [x[layer] for x in passes], labels, test[layer], test_labels)
        assert actual[layer] == expected
    assert (actual > least).all()


def test_the_recipes_are_those_of_the_authors():
    assert (DDAE.epochs, DDAE.batch_size, DDAE.lr, DDAE.norm) == (15, 128, 1e-3, False)
    assert (REPA.epochs, REPA.batch_size, REPA.lr, REPA.norm) == (90, 16_384, 6.4, True)
    assert [IN100.rate(passed) for passed in (0.0, 1.0)] == [1e-2, 1e-2]
    assert [REPA.rate(passed) for passed in (0.0, 5.0, 10.0, 50.0)] == pytest.approx([0, 3.2, 6.4, 3.2])
    assert float(REPA.start(400, 10)[-1].weight.std()) == pytest.approx(0.01, rel=0.05)
