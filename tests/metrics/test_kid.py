"""The kernel distance against torch-fidelity, and what it must not depend on."""

import numpy as np
import pytest
import torch
from refusals import raises_user_error

from uvit_decay.metrics.kid import kernel_distance


def features(n, d=16, seed=0, shift=0.0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).abs() + shift


REAL, FAKE = features(120, seed=1), features(90, seed=2, shift=0.1)


@pytest.mark.parametrize(("subsets", "size"), [(1, 90), (20, 40), (5, 2)])
def test_it_is_the_one_of_torch_fidelity(subsets, size):
    """In float64, which they leave to the features; and close to what float32 gives them."""
    from torch_fidelity.metric_kid import kid_features_to_metric

    actual = kernel_distance(REAL, FAKE, subsets, size)
    for real, fake, bound in ((REAL.double(), FAKE.double(), 1e-12), (REAL, FAKE, 1e-4)):
        theirs = kid_features_to_metric(fake, real, kid_subsets=subsets, kid_subset_size=size, verbose=False)
        assert actual[0] == pytest.approx(theirs["kernel_inception_distance_mean"], rel=bound)
        assert actual[1] == pytest.approx(theirs["kernel_inception_distance_std"], abs=bound)


def test_the_global_stream_is_left_alone():
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    first = kernel_distance(REAL, FAKE, 3, 50)
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002
    assert kernel_distance(REAL, FAKE, 3, 50) == first != kernel_distance(REAL, FAKE, 3, 50, seed=1)


@pytest.mark.parametrize(
    ("real", "fake", "size", "reason"),
    [
        (REAL, FAKE, 1, ("subset_size", 2, 1)),
        (REAL, FAKE[:, :4], 10, ("kernel distance", 16, 4)),
    ],
)
def test_what_cannot_be_compared_is_a_user_error(real, fake, size, reason):
    with raises_user_error(reason):
        kernel_distance(real, fake, 2, size)
