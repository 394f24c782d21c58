"""The Frechet distance against its formula, numpy, and itself on two processes."""

import numpy as np
import pytest
import torch
from gloo import on_two_processes
from refusals import raises_user_error

from uvit_decay.metrics.frechet import Moments, Statistics, frechet_distance

DIM = 6


def rotation(d):
    return torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(5))).Q


def features(n, d=DIM, seed=0, shift=0.0):
    """Correlated features of uneven scales, not centred."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, d, generator=g) * torch.linspace(0.2, 2, d)) @ rotation(d).float() + 1 + shift


REAL, FAKE = features(80, seed=1), features(53, seed=2, shift=0.4)


def moments(x, batch_size=None):
    metric = Moments(x.shape[1])
    for part in x.split(batch_size or len(x)):
        metric.update(part)
    return metric.compute()


def distance(real, fake):
    return frechet_distance(moments(real), moments(fake))


def statistics(x):
    x = x.double().numpy()
    return x.mean(0), np.cov(x, rowvar=False)


@pytest.mark.parametrize(("n1", "n2", "d"), [(80, 53, 6), (5, 7, 40), (2, 2, 10), (200, 10, 64), (10, 200, 64)])
def test_it_is_the_formula_and_fewer_images_than_features_need_no_regularisation(n1, n2, d):
    """The trace of the root is the sum of the singular values of A_1 A_2', S = A' A, which needs no covariance."""
    real, fake = features(n1, d, seed=1), features(n2, d, seed=2, shift=0.4)
    (m1, a1), (m2, a2) = ((x.mean(0), (x - x.mean(0)) / (len(x) - 1) ** 0.5) for x in (real.double(), fake.double()))
    cross = torch.linalg.svdvals(a1 @ a2.T).sum()
    expected = (m1 - m2).square().sum() + a1.square().sum() + a2.square().sum() - 2 * cross
    assert distance(real, fake) == pytest.approx(expected.item(), rel=1e-10)


def test_features_like_those_of_inception_lose_no_digits():
    """Mean 0.4 and standard deviations down to 0.001: cancellation takes 5 of float64's 16 digits."""
    spread = torch.logspace(-3, 0, 64, dtype=torch.float64)
    x = (0.4 + spread * torch.randn(5000, 64, generator=torch.Generator().manual_seed(0)).double()).abs()
    _, cov = statistics(x)
    scale = np.sqrt(np.outer(cov.diagonal(), cov.diagonal()))
    assert (np.abs(moments(x, 100).cov.numpy() - cov) / scale).max() < 1e-10


def test_two_processes_find_what_one_finds(programs, tmp_path):
    """Uneven shards, another number of updates on each rank, a rank without images, and again after a reset."""
    actual = on_two_processes(programs, moments_of_one_of_two, tmp_path)
    mean, cov = statistics(REAL)
    for name in ("uneven", "nothing on rank 1", "again"):
        assert actual[0][name] == actual[1][name], name
        total, spread = actual[0][name]
        np.testing.assert_allclose(total, mean, rtol=1e-12)
        np.testing.assert_allclose(spread, cov, rtol=1e-10, atol=1e-14)
    assert [result["local n"] for result in actual] == [10, 70]


def moments_of_one_of_two(rank):
    uneven, lonely = Moments(DIM), Moments(DIM)
    for part in (REAL[:10] if rank == 0 else REAL[10:]).split(8):
        uneven.update(part)
    if rank == 0:
        lonely.update(REAL)
    result = {"uneven": plain(uneven), "nothing on rank 1": plain(lonely), "local n": int(uneven.n)}
    uneven.reset()
    uneven.update(REAL[rank::2])
    return {**result, "again": plain(uneven)}


def plain(metric):
    mean, cov = metric.compute()
    return mean.tolist(), cov.tolist()


def test_features_of_a_single_image_are_a_user_error():
    with raises_user_error("Frechet", "images", 1):
        moments(REAL[:1])


def test_rounding_is_not_refused():
    """Negative eigenvalues of float32 covariances of few images, and of features that do not vary."""
    few = features(10, 64).double()
    mean, cov = moments(few)
    rounded = Statistics(mean.float().double(), cov.float().double())
    assert torch.linalg.eigvalsh(rounded.cov).min() < 0
    assert frechet_distance(rounded, Statistics(mean, cov)) < 1e-5 * cov.trace()
    equal = torch.full((1000, 64), 0.3) * torch.linspace(1, 50, 64)
    assert moments(equal).cov.diagonal().min() < 0
    assert distance(equal, equal[:7]) == pytest.approx(0, abs=1e-9)
    assert distance(0 * equal, 0 * equal) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_of_any_features_are_kept_in_float64(dtype):
    metric = Moments(DIM).half()
    with torch.autocast("cpu", torch.bfloat16):
        metric.update(REAL.to(dtype).clone().requires_grad_())
    assert not metric.outer.requires_grad
    assert {metric.sum.dtype, metric.outer.dtype} == {torch.float64}
    assert torch.equal(metric.sum, REAL.to(dtype).double().sum(0))
    assert metric.n.dtype == torch.int64
