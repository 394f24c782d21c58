"""The Frechet distance against closed forms, scipy, torchmetrics, and itself on two processes."""

import json

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.distributed as dist
from gloo import on_two_processes
from torch import nn

from uvit_decay.errors import UserError
from uvit_decay.metrics.frechet import FrechetDistance, frechet_distance

DIM = 6


def rotation(d):
    return torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(5))).Q


def features(n, d=DIM, seed=0, shift=0.0):
    """Correlated features of uneven scales, not centred."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, d, generator=g) * torch.linspace(0.2, 2, d)) @ rotation(d).float() + 1 + shift


REAL, FAKE = features(80, seed=1), features(53, seed=2, shift=0.4)


def distance(real, fake, batch_size=None):
    metric = FrechetDistance(real.shape[1])
    for side, x in ((True, real), (False, fake)):
        for part in x.split(batch_size or len(x)):
            metric.update(part, real=side)
    return metric.compute()


def statistics(x):
    x = x.double().numpy()
    return x.mean(0), np.cov(x, rowvar=False)


def by_matrix_root(real, fake):
    """The formula, with scipy's root of the product."""
    (m1, s1), (m2, s2) = statistics(real), statistics(fake)
    return ((m1 - m2) ** 2).sum() + np.trace(s1 + s2 - 2 * scipy.linalg.sqrtm(s1 @ s2).real)


def by_eigenvalues(real, fake):
    """The formula, with the roots of the eigenvalues of the product, which is not symmetric."""
    (m1, s1), (m2, s2) = statistics(real), statistics(fake)
    roots = np.sqrt(np.linalg.eigvals(s1 @ s2).astype(complex)).real
    return ((m1 - m2) ** 2).sum() + np.trace(s1 + s2) - 2 * roots.sum()


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(
    ("stds1", "stds2", "shift"),
    [
        ((1, 2, 3), (1, 2, 3), 0.0),
        ((1, 2, 3), (3, 1, 0.5), 2.0),
        ((1, 2, 0), (3, 0, 1), 1.0),
        ((0, 0, 0), (1, 1, 1), 0),
    ],
)
def test_gaussians_with_common_axes_have_a_closed_form(stds1, stds2, shift, rotated):
    """d^2 = |shift|^2 + sum (s_1 - s_2)^2."""
    q = rotation(3) if rotated else torch.eye(3, dtype=torch.float64)
    s1, s2 = (torch.tensor(s, dtype=torch.float64) for s in (stds1, stds2))
    mean = torch.ones(3, dtype=torch.float64)
    found = frechet_distance(mean, q * s1**2 @ q.T, mean + shift * q[0], q * s2**2 @ q.T)
    wanted = shift**2 + (s1 - s2).square().sum().item()
    # A direction of no variance is known to the root of the rounding error.
    assert found == pytest.approx(wanted, abs=1e-8 if min(*stds1, *stds2) > 0 else 1e-6)


@pytest.mark.parametrize("stds", [(1, 2, 3), (1, 2, 0)])
def test_equal_gaussians_have_no_distance(stds):
    mean, cov = torch.ones(3).double(), torch.diag(torch.tensor(stds).double() ** 2)
    assert frechet_distance(mean, cov, mean, cov) == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize(("n1", "n2", "d"), [(80, 53, 6), (500, 400, 32), (40, 40, 1)])
def test_it_is_the_formula_with_a_matrix_root(n1, n2, d):
    real, fake = features(n1, d, seed=1), features(n2, d, seed=2, shift=0.4)
    if d > 1:
        assert distance(real, fake) == pytest.approx(by_matrix_root(real, fake), rel=1e-6)
    else:
        gap = real.double().std() - fake.double().std()
        wanted = (real.double().mean() - fake.double().mean()).square() + gap.square()
        assert distance(real, fake) == pytest.approx(wanted.item(), rel=1e-8)


@pytest.mark.parametrize("batch_size", [1, 7, 50])
def test_streaming_is_one_batch(batch_size):
    assert distance(REAL, FAKE, batch_size) == pytest.approx(distance(REAL, FAKE), rel=1e-10)


def test_real_and_fake_may_come_in_turns():
    metric = FrechetDistance(DIM)
    for part in range(4):
        metric.update(FAKE[part::4], real=False)
        metric.update(REAL[part::4], real=True)
    assert metric.compute() == pytest.approx(distance(REAL, FAKE), rel=1e-10)


@pytest.mark.parametrize(("n1", "n2", "d"), [(5, 7, 40), (2, 2, 10), (200, 10, 64), (10, 200, 64)])
def test_fewer_pictures_than_features_need_no_regularisation(n1, n2, d):
    real, fake = features(n1, d, seed=1), features(n2, d, seed=2, shift=0.4)
    found = distance(real, fake)
    assert found == pytest.approx(by_eigenvalues(real, fake), rel=1e-5)
    assert found > 0


@pytest.mark.parametrize(("n", "d"), [(80, 6), (10, 64), (500, 64)])
def test_equal_sets_have_no_distance(n, d):
    x = features(n, d)
    scale = x.double().var(dim=0).sum().item()
    assert distance(x, x.flip(0)) == pytest.approx(0, abs=1e-6 * scale)


def test_it_is_symmetric():
    assert distance(REAL, FAKE) == pytest.approx(distance(FAKE, REAL), rel=1e-9)


def test_a_large_common_offset_costs_no_accuracy():
    """Sums of squares lose digits to the mean; float64 has them to spare."""
    real, fake = features(2000, seed=1).double(), features(2000, seed=2, shift=0.4).double()
    assert distance(real + 1000, fake + 1000) == pytest.approx(distance(real, fake), rel=1e-6)


class Pixels(nn.Module):
    """A feature extractor whose features are the pixels."""

    num_features = DIM

    def forward(self, images):
        return images.flatten(1).float()


def test_it_is_the_one_of_torchmetrics():
    from torchmetrics.image.fid import FrechetInceptionDistance

    g = torch.Generator().manual_seed(0)
    real = torch.randint(0, 200, (90, 3, 1, 2), generator=g, dtype=torch.uint8)
    fake = torch.randint(40, 256, (70, 3, 1, 2), generator=g, dtype=torch.uint8)
    theirs = FrechetInceptionDistance(feature=Pixels(), normalize=False)
    theirs.update(real, real=True)
    theirs.update(fake, real=False)
    ours = distance(real.flatten(1).float(), fake.flatten(1).float())
    assert ours == pytest.approx(theirs.compute().item(), rel=1e-4)


def test_two_processes_find_what_one_finds(tmp_path):
    """Uneven shards, another number of updates on each rank, and a rank without fake pictures."""
    found = on_two_processes(one_of_two, tmp_path)
    for name in ("uneven", "no fake on rank 1", "again"):
        assert found[0][name] == found[1][name] == pytest.approx(distance(REAL, FAKE), rel=1e-10), name
    assert [result["local n"] for result in found] == [[10, 50], [70, 3]]


def one_of_two(rank, address, folder):
    dist.init_process_group("gloo", address, rank=rank, world_size=2)
    uneven, lonely = FrechetDistance(DIM), FrechetDistance(DIM)
    for part in (REAL[:10] if rank == 0 else REAL[10:]).split(8):
        uneven.update(part, real=True)
        lonely.update(part, real=True)
    for part in FAKE[:50].split(20) if rank == 0 else [FAKE[50:]]:
        uneven.update(part, real=False)
    if rank == 0:
        lonely.update(FAKE, real=False)
    result = {"uneven": uneven.compute(), "no fake on rank 1": lonely.compute()}
    result["local n"] = [int(uneven.real_n), int(uneven.fake_n)]
    uneven.reset()
    uneven.update(REAL[rank::2], real=True)
    uneven.update(FAKE[rank::2], real=False)
    result["again"] = uneven.compute()
    (folder / str(rank)).write_text(json.dumps(result))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("real", "fake", "reason"),
    [(0, 5, "real pictures, got 0"), (1, 5, "real pictures, got 1"), (5, 1, "fake .* got 1")],
)
def test_fewer_than_two_pictures_are_a_user_error(real, fake, reason):
    metric = FrechetDistance(DIM)
    metric.update(REAL[:real], real=True)
    metric.update(FAKE[:fake], real=False)
    with pytest.raises(UserError, match=f"^the Frechet distance needs at least two {reason}$"):
        metric.compute()


def test_autocast_changes_nothing():
    wanted = distance(REAL, FAKE)
    with torch.autocast("cpu", torch.bfloat16):
        assert distance(REAL, FAKE) == wanted


def test_sums_are_kept_in_float64():
    metric = FrechetDistance(DIM).half()
    metric.update(REAL, real=True)
    assert {metric.real_sum.dtype, metric.real_outer.dtype, metric.fake_outer.dtype} == {torch.float64}
    assert metric.real_n.dtype == torch.int64


def test_updates_do_not_keep_the_graph():
    metric = FrechetDistance(DIM)
    metric.update(REAL.clone().requires_grad_(), real=True)
    assert not metric.real_outer.requires_grad
