"""The parts of a report besides the metrics."""

from unittest.mock import Mock

import pytest
import torch

from uvit_decay.evaluation.comparison import Comparison, are_same_classes
from uvit_decay.evaluation.feature_store import FeatureStore
from uvit_decay.evaluation.report import _measure_coverage
from uvit_decay.evaluation.statistics_file import Reference


@pytest.mark.parametrize("ours", ["one", "0"])  # labels of an array are numbers
def test_coverage_is_the_share_of_reference_images_near_samples(ours):
    spread = torch.linspace(0, 1, 16)[:, None].repeat(1, 2)
    real = torch.cat([spread, spread + 100])  # two clusters
    fake = spread.repeat(2, 1) + 1e-3  # in the first alone
    side = Mock(class_names=("one",), labels=torch.zeros(32, dtype=torch.int64))
    own = Mock(class_names=(ours,), labels=side.labels)
    comparison = Mock(spec=Comparison, samples=own, reference=side)
    samples, reference = Mock(spec=FeatureStore), Mock(spec=Reference, store=Mock(spec=FeatureStore))
    samples.tensor, reference.tensor = Mock(return_value=fake), Mock(return_value=real)
    assert _measure_coverage(comparison, samples, reference) == {"one": 0.5}
    own.class_names = ("two",)
    assert _measure_coverage(comparison, samples, reference) is None
    own.class_names, own.labels = ("one",), None
    assert _measure_coverage(comparison, samples, reference) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (("cat", "dog"), ("cat", "dog"), True),
        (("cat", "dog"), ("dog", "cat"), False),
        (("0", "1"), ("cat", "dog", "emu"), True),
        (("0", "1", "2"), ("cat", "dog"), False),
        (tuple(map(str, range(11))), tuple(sorted(map(str, range(11)))), False),
        (tuple(sorted(map(str, range(11)))), tuple("abcdefghijk"), False),
    ],
)
def test_numbers_count_classes_unless_these_are_numbers_in_another_order(ours, theirs, same):
    assert are_same_classes(ours, theirs) is same
