"""The Inception Score against hand computations and torch-fidelity."""

import math

import numpy as np
import pytest
import torch

from uvit_decay.metrics.inception_score import inception_score
from uvit_decay.runtime.errors import UserError

FAR = 60.0  # exp(-60) is nothing


def logits(n, k=10, seed=0, scale=2.0):
    return scale * torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def one_hot(labels, k):
    return FAR * torch.nn.functional.one_hot(torch.as_tensor(labels), k).float()


def by_hand(z):
    """exp of the mean over x of sum_y p(y | x) log(p(y | x) / p(y)), with plain floats."""
    p = [[math.exp(v) for v in row] for row in z.double().tolist()]
    p = [[v / sum(row) for v in row] for row in p]
    marginal = [sum(column) / len(p) for column in zip(*p, strict=True)]
    kl = [sum(v * math.log(v / m) for v, m in zip(row, marginal, strict=True)) for row in p]
    return math.exp(sum(kl) / len(kl))


def test_a_small_case_by_hand():
    """p(y | x) = (3/4, 1/4) and (1/4, 3/4): the KL from (1/2, 1/2) is 3/4 log 3/2 + 1/4 log 1/2, twice."""
    z = torch.tensor([[0.75, 0.25], [0.25, 0.75]]).log()
    expected = 1.5**0.75 * 0.5**0.25
    assert inception_score(z, splits=1) == (pytest.approx(expected, rel=1e-6), 0.0)


@pytest.mark.parametrize("k", [2, 5, 10])
def test_certain_and_balanced_images_score_the_number_of_classes(k):
    score, spread = inception_score(one_hot(list(range(k)) * 20, k), splits=1)
    assert (score, spread) == (pytest.approx(k, rel=1e-6), 0.0)


@pytest.mark.parametrize("z", [torch.zeros(30, 4), one_hot([2] * 30, 4), logits(1).expand(30, 10)])
def test_images_that_are_all_alike_score_one(z):
    assert inception_score(z, splits=3) == (pytest.approx(1, abs=1e-6), pytest.approx(0, abs=1e-6))


def test_a_common_factor_in_the_logits_does_not_matter():
    shift = torch.linspace(-20, 20, 50)[:, None]
    assert inception_score(logits(50) + shift, 5) == pytest.approx(inception_score(logits(50), 5), rel=1e-5)


@pytest.mark.parametrize("splits", [2, 5, 7])
def test_splits_are_parts_of_a_fixed_order(splits):
    """Numbers of splits that do not divide the number of images, too."""
    z = logits(100)
    order = np.random.RandomState(2020).permutation(100)  # noqa: NPY002
    cuts = [i * 100 // splits for i in range(splits + 1)]
    scores = [by_hand(z[order[cuts[i] : cuts[i + 1]]]) for i in range(splits)]
    expected = (pytest.approx(np.mean(scores), rel=1e-6), pytest.approx(np.std(scores), rel=1e-4))
    assert inception_score(z, splits) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "splits"), [(101, 1), (100, 10), (203, 10), (1007, 7), (30, 30)])
def test_it_is_the_one_of_torch_fidelity(n, splits, dtype):
    from torch_fidelity.metric_isc import isc_features_to_metric

    z = logits(n, k=50).to(dtype)
    theirs = isc_features_to_metric(z, splits)
    score, spread = inception_score(z, splits)
    assert score == pytest.approx(theirs["inception_score_mean"], rel=1e-12)
    assert spread == pytest.approx(theirs["inception_score_std"], abs=1e-12)


def test_the_global_stream_is_left_alone_and_not_read():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    first = inception_score(logits(50))
    assert torch.equal(torch.rand(3), expected)
    assert inception_score(logits(50)) == first


@pytest.mark.parametrize(("n", "splits"), [(0, 1), (9, 10), (1, 2)])
def test_fewer_images_than_splits_are_a_user_error(n, splits):
    with pytest.raises(UserError, match=f"^the Inception Score over {splits} splits needs .*, got {n}$"):
        inception_score(torch.zeros(n, 4), splits)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_a_user_error(value):
    z = logits(20)
    z[3, 1] = value
    with pytest.raises(UserError, match="^the Inception Score: the logits hold NaN or infinity$"):
        inception_score(z, 2)


def test_autocast_changes_nothing():
    expected = inception_score(logits(50))
    with torch.autocast("cpu", torch.bfloat16):
        assert inception_score(logits(50)) == expected


def test_bfloat16_logits_are_scored_in_float64():
    z = logits(50).bfloat16()
    assert inception_score(z) == inception_score(z.double())
