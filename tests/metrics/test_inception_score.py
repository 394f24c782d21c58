"""The Inception Score against hand computations and torch-fidelity."""

import pytest
import torch
from refusals import raises_user_error

from uvit_decay.metrics.inception_score import inception_score

FAR = 60.0  # exp(-60) is nothing


def logits(n, k=10, seed=0, scale=2.0):
    return scale * torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def one_hot(labels, k):
    return FAR * torch.nn.functional.one_hot(torch.as_tensor(labels), k).float()


@pytest.mark.parametrize("k", [2, 5, 10])
def test_certain_and_balanced_images_score_the_number_of_classes(k):
    score, spread = inception_score(one_hot(list(range(k)) * 20, k), splits=1)
    assert (score, spread) == (pytest.approx(k, rel=1e-6), 0.0)


@pytest.mark.parametrize("z", [torch.zeros(30, 4), one_hot([2] * 30, 4), logits(1).expand(30, 10)])
def test_images_that_are_all_alike_score_one(z):
    assert inception_score(z, splits=3) == (pytest.approx(1, abs=1e-6), pytest.approx(0, abs=1e-6))


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


@pytest.mark.parametrize(
    ("z", "splits", "reason"),
    [
        *((torch.zeros(n, 4), k, (f"{k} splits", n)) for n, k in ((0, 1), (9, 10), (1, 2))),
        *((logits(20) * value, 2, ("logits", "NaN")) for value in (float("nan"), float("inf"))),
    ],
)
def test_logits_without_a_score_are_a_user_error(z, splits, reason):
    with raises_user_error("Inception Score", reason):
        inception_score(z, splits)


def test_scores_are_computed_in_float64_whatever_is_around():
    z = logits(50).bfloat16()
    expected = inception_score(z.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert inception_score(z) == expected
