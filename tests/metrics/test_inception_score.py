"""The Inception Score against torch-fidelity."""

import pytest
import torch
from refusals import raises_user_error

from uvit_decay.metrics.inception_score import inception_score


def logits(n, k=10, seed=0, scale=2.0):
    return scale * torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


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


def test_logits_of_too_few_images_are_a_user_error():
    with raises_user_error("Inception Score", "10 splits", 9):
        inception_score(torch.zeros(9, 4), 10)


def test_scores_are_computed_in_float64_whatever_is_around():
    z = logits(50).bfloat16()
    expected = inception_score(z.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert inception_score(z) == expected
