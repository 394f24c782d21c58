"""Colours and clusters of patches against scikit-learn and planted groups."""

import itertools

import pytest
import torch
from refusals import raises_user_error
from sklearn.cluster import SpectralClustering
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score

from uvit_decay.representations import patches
from uvit_decay.representations.patches import Colours, spectral_clusters


def patch_features(n=20, p=30, d=9, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, p, d, generator=g) * torch.linspace(3, 0.1, d) + torch.linspace(-50, 50, d)


def planted(n=4, p=25, groups=3, d=16, noise=0.3, seed=0):
    """Return patches about `groups` orthogonal directions, and which they are about."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n * p).remainder(groups)[torch.randperm(n * p, generator=g)].reshape(n, p)
    return torch.eye(d)[labels] + noise * torch.randn(n, p, d, generator=g) / d**0.5, labels


def test_axes_are_scikit_learns():
    features = patch_features()
    expected, actual = PCA(3, svd_solver="full").fit(features.double().flatten(0, 1).numpy()), Colours.of(features)
    torch.testing.assert_close(actual.mean, torch.from_numpy(expected.mean_))
    cosines = (actual.axes * torch.from_numpy(expected.components_)).sum(1).abs()
    torch.testing.assert_close(cosines, torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(actual.explained, torch.from_numpy(expected.explained_variance_ratio_))
    assert (actual.axes.gather(1, actual.axes.abs().argmax(1, keepdim=True)) > 0).all()


def test_a_large_mean_costs_no_digits():
    features = patch_features().double()
    near, far = Colours.of(features), Colours.of(features + 1e6)
    torch.testing.assert_close(far.axes, near.axes, atol=1e-7, rtol=0)
    torch.testing.assert_close(far(features + 1e6), near(features), atol=1e-7, rtol=0)
    assert torch.equal(Colours.of(features.float())(features), Colours.of(features.float().double())(features))


def test_colours_fill_the_range_and_one_odd_patch_does_not_matter():
    features = patch_features(p=60)
    expected = Colours.of(features)(features)
    assert expected.shape == (20, 60, 3)
    assert expected.min() == 0
    assert expected.max() == 1
    saturated = ((expected == 0) | (expected == 1)).double().mean(dim=(0, 1))
    assert ((saturated > 0.01) & (saturated < 0.04)).all()
    odd = features.clone()
    odd[0, 0, 0] += 50
    assert (Colours.of(odd)(features) - expected).abs().mean() < 0.02


def test_constant_features_are_grey():
    constant = torch.full((2, 4, 5), 3.0)
    actual = Colours.of(constant)
    assert actual.explained.tolist() == [0, 0, 0]
    assert (actual(constant) == 0.5).all()


@pytest.mark.parametrize("features", [torch.zeros(2, 4, 2), torch.full((2, 4, 5), torch.nan), torch.zeros(1, 1, 5)])
def test_what_has_no_components_is_refused(features):
    with raises_user_error("principal components"):
        Colours.of(features)


def test_planted_groups_are_found_and_in_all_images_the_same():
    features, labels = planted()
    actual = spectral_clusters(features, 3, neighbours=10)
    assert actual.eigenvectors.shape == (4, 25, 3)
    assert adjusted_rand_score(labels.flatten(), actual.labels.flatten()) == 1
    moved = spectral_clusters(5 * features + 100, 3, neighbours=10)  # lengths and a common vector do not matter
    assert adjusted_rand_score(actual.labels.flatten(), moved.labels.flatten()) == 1
    again = spectral_clusters(features, 3, neighbours=10)
    assert torch.equal(again.labels, actual.labels)
    assert torch.equal(again.eigenvectors, actual.eigenvectors)


def test_clusters_are_scikit_learns_on_the_same_graph():
    features, labels = planted(noise=1.5)
    weights = patches._build_affinity(features, 10)
    assert abs(weights - weights.T).max() == 0
    assert weights.diagonal().max() == 0
    assert weights.data.min() > patches.FLOOR / 2
    expected = SpectralClustering(3, affinity="precomputed", assign_labels="kmeans", random_state=0).fit(
        weights.toarray()
    )
    actual = spectral_clusters(features, 3, neighbours=10)
    assert adjusted_rand_score(expected.labels_, actual.labels.flatten()) > 0.9
    assert adjusted_rand_score(labels.flatten(), actual.labels.flatten()) > 0.8


def test_eigenvectors_solve_the_random_walk_and_lanczos_finds_the_same(monkeypatch):
    features, _ = planted(noise=3.0)
    dense = spectral_clusters(features, 3, neighbours=10)
    weights = torch.from_numpy(patches._build_affinity(features, 10).toarray())
    v = dense.eigenvectors.flatten(0, 1)
    walked = weights @ v / weights.sum(1, keepdim=True)
    eigenvalues = (walked * v).sum(0) / v.square().sum(0)
    torch.testing.assert_close(walked, eigenvalues * v)
    assert (eigenvalues.diff() < 0).all()
    assert eigenvalues[0] < 1 - 1e-6
    monkeypatch.setattr(patches, "DENSE", 10)
    lanczos = spectral_clusters(features, 3, neighbours=10)
    torch.testing.assert_close(lanczos.eigenvectors, dense.eigenvectors, atol=1e-7, rtol=0)
    assert torch.equal(lanczos.labels, dense.labels)
    assert dense.rgb().shape == (4, 25, 3)
    assert (dense.rgb().amin(dim=(0, 1)) == 0).all()
    assert (dense.rgb().amax(dim=(0, 1)) == 1).all()


def test_neighbours_are_brute_forces():
    """Of each patch: the k most similar ones of its own image, and of the others."""
    features, _ = planted(n=3, p=7, noise=3.0)
    x = features.double().flatten(0, 1)
    x = torch.nn.functional.normalize(x - x.mean(0), dim=1)
    image = torch.arange(21) // 7
    expected = torch.zeros(21, 21, dtype=torch.float64)
    for i, j in itertools.permutations(range(21), 2):
        rivals = [k for k in range(21) if k != i and (image[k] == image[i]) == (image[j] == image[i])]
        rank = sorted(rivals, key=lambda k: -float(x[i] @ x[k])).index(j)
        if rank < 3 and x[i] @ x[j] > patches.FLOOR:
            expected[i, j] = x[i] @ x[j]
    weights = patches._build_affinity(features, 3).toarray()
    torch.testing.assert_close(torch.from_numpy(weights), (expected + expected.T) / 2)


def test_a_single_image_and_patches_without_neighbours_are_clustered():
    features, labels = planted(n=1, p=60)
    features = features.double()
    features = torch.cat([features, features.mean(dim=(0, 1), keepdim=True)], dim=1)  # the mean: of no direction
    actual = spectral_clusters(features, 3, neighbours=100)
    assert adjusted_rand_score(labels.flatten(), actual.labels[0, :60]) == 1
    assert actual.eigenvectors.isfinite().all()
    assert actual.eigenvectors[0, 60].abs().max() == 0
    with raises_user_error("spectral", "patches"):
        spectral_clusters(torch.ones(2, 10, 4), 2)


def test_what_cannot_be_clustered_is_refused():
    with raises_user_error("2 spectral", "4 patches"):
        spectral_clusters(torch.randn(1, 4, 5), 2, 5)
    with raises_user_error("NaN"):
        spectral_clusters(torch.full((2, 9, 4), float("inf")), 2)
