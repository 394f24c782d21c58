"""Precision, recall, coverage and nearest neighbours against loops, torch-fidelity and small sets."""

from importlib import import_module

import pytest
import torch
from refusals import raises_user_error

from uvit_decay.metrics.precision_recall import find_covered, nearest, precision_recall

module = import_module("uvit_decay.metrics.precision_recall")  # the subpackage has the function by this name


def features(n, d=16, seed=0, scale=1.0):
    return scale * torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).abs()


def lattice(n, seed=0):
    """Few places for many points: twins and ties everywhere."""
    return torch.randint(0, 3, (n, 4), generator=torch.Generator().manual_seed(seed)).float()


REAL, FAKE = features(150, seed=1), features(110, seed=2, scale=0.9)


def line(*points):
    return torch.tensor(points, dtype=torch.float32)[:, None]


def by_loop(queries, keys, k):
    """Return the k smallest (distance, index) of each query."""
    rows = [
        sorted((float((q - key).square().sum()), j) for j, key in enumerate(keys.double())) for q in queries.double()
    ]
    return [[d**0.5 for d, _ in row[:k]] for row in rows], [[j for _, j in row[:k]] for row in rows]


@pytest.mark.parametrize("block", [7, 64, 2048])
@pytest.mark.parametrize(("queries", "keys"), [(FAKE, REAL), (REAL, REAL), (lattice(40), lattice(60, seed=1))])
def test_nearest_is_a_loop(queries, keys, block):
    """In blocks of any size, and ties by index."""
    distances, indices = nearest(queries, keys, 5, block)
    expected, which = by_loop(queries, keys, 5)
    assert indices.tolist() == which
    torch.testing.assert_close(distances, torch.tensor(expected), rtol=2e-7, atol=0)


@pytest.mark.parametrize("gap", [0.0, 1e-6, 1e-4, 1e-2])
def test_close_images_far_from_the_origin_lose_no_digits(gap):
    """|x|^2 + |y|^2 - 2 x . y would; two equal images have a distance of exactly 0."""
    x = 100 + features(50, 64).double()
    distances, indices = nearest(x + gap, x, 1)
    assert indices[:, 0].tolist() == list(range(50))
    expected = ((x + gap) - x).square().sum(1).sqrt().float()
    torch.testing.assert_close(distances[:, 0], expected, rtol=1e-5, atol=0)


def test_images_that_are_all_alike_are_taken_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "PAIRS_AT_ONCE", 100)
    distances, indices = nearest(torch.full((30, 16), 7.3), torch.full((40, 16), 7.3), 2)
    assert distances.eq(0).all()
    assert indices.tolist() == [[0, 1]] * 30


@pytest.mark.parametrize(
    ("n", "m", "d", "k", "dtype"),
    [(150, 110, 16, 1, torch.float32), (60, 200, 3, 3, torch.float64), (300, 300, 64, 10, torch.float32)],
)
def test_precision_and_recall_are_those_of_torch_fidelity(n, m, d, k, dtype):
    from torch_fidelity.metric_prc import prc_features_to_metric

    real, fake = features(n, d, seed=1).to(dtype), features(m, d, seed=2, scale=0.9).to(dtype)
    theirs = prc_features_to_metric(fake, real, prc_neighborhood=k, verbose=False)
    expected = (pytest.approx(theirs["precision"], abs=1e-6), pytest.approx(theirs["recall"], abs=1e-6))
    assert precision_recall(real, fake, k) == expected


@pytest.mark.parametrize("block", [9, 64])
def test_blocks_change_nothing(block):
    for real, fake in ((REAL, FAKE), (lattice(60), lattice(50, seed=1)), (REAL, REAL)):
        assert precision_recall(real, fake, block=block) == precision_recall(real, fake)
        assert torch.equal(find_covered(real, fake, block=block), find_covered(real, fake))


def test_coverage_on_a_line():
    """k = 1, open balls of radii 1, 1, 7 about 0, 1, 8: 0.5 lies in two, 2 in the last alone, 15 on its border."""
    assert find_covered(line(0, 1, 8), line(0.5, 2, 15), k=1).tolist() == [True, True, True]
    assert find_covered(line(0, 1, 8), line(3, 4, 4.5, 15), k=1).tolist() == [False, False, True]


def test_coverage_is_the_formula_of_its_authors():
    """Naeem et al.: mean_i of 1[some y_j in B_i], with plain matrices."""
    radii = torch.cdist(REAL.double(), REAL.double()).kthvalue(6).values
    inside = torch.cdist(REAL.double(), FAKE.double()) < radii[:, None]
    assert torch.equal(find_covered(REAL, FAKE, k=5), inside.any(dim=1))


@pytest.mark.parametrize(
    ("compare", "reason"),
    [
        (lambda: precision_recall(REAL[:3], FAKE), ("3 nearest", "3 real", 3)),
        (lambda: find_covered(REAL / 0, FAKE), ("coverage", "NaN")),
    ],
)
def test_what_cannot_be_compared_is_a_user_error(compare, reason):
    with raises_user_error(reason):
        compare()
