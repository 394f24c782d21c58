"""What a report says beside the metrics."""

from types import SimpleNamespace

import torch

from uvit_decay.evaluation.report import _coverage


class Stored:
    """A feature store of one tensor."""

    def __init__(self, features):
        self.features, self.store = features, self

    def tensor(self, name):
        return {"features": self.features}[name]


def test_coverage_is_the_share_of_reference_images_near_samples():
    spread = torch.linspace(0, 1, 16)[:, None].repeat(1, 2)
    real = torch.cat([spread, spread + 100])  # two clusters
    fake = spread.repeat(2, 1) + 1e-3  # in the first alone
    side = SimpleNamespace(class_names=("one",), labels=torch.zeros(32, dtype=torch.int64))
    comparison = SimpleNamespace(samples=side, reference=side)
    assert _coverage(comparison, Stored(fake), Stored(real)) == {"one": 0.5}
