"""Nearest neighbours against brute force and scikit-learn; how the training set is cut changes nothing."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch.overrides import TorchFunctionMode

from uvit_decay.representations import knn
from uvit_decay.representations.knn import find_neighbours, knn_accuracy, vote

CLASSES, CELLS, N, N2, D = 5, 3, 203, 97, 8


@pytest.fixture(scope="module")
def data():
    """Grid points with a little more signal each."""
    g = torch.Generator().manual_seed(0)
    y, y2 = torch.randint(CLASSES, (N,), generator=g), torch.randint(CLASSES, (N2,), generator=g)
    means, strength = torch.randn(CLASSES, D, generator=g), torch.tensor([0.0, 0.5, 1.0])[:, None, None]
    train = torch.randn(CELLS, N, D, generator=g) + strength * means[y]
    test = torch.randn(CELLS, N2, D, generator=g) + strength * means[y2]
    return train, y, test, y2


def predicted(train, y, test, k=20, **options):
    near = [find_neighbours(*sides, k) for sides in zip(train, test, strict=True)]
    return torch.stack([vote(similar, y[index], **options) for similar, index in near])


def test_centred_cosines_do_not_see_what_all_features_have_in_common(data):
    train, y, test, y2 = data
    mean = train.mean(dim=1, keepdim=True)
    expected = knn_accuracy(train - mean, y, test - mean, y2)
    assert knn_accuracy(train + 1000, y, test + 1000, y2, centred=True) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
    ("k", "temperature", "uniform"),
    [(20, 0.07, False), (20, 0.005, False), (20, 1.0, True), (1, 0.07, False), (203, 0.07, False)],
)
def test_classes_are_scikit_learns(data, k, temperature, uniform):
    train, y, test, y2 = data
    weights = "uniform" if uniform else lambda distance: np.exp((1 - distance) / temperature)
    actual = predicted(train, y, test, k, temperature=temperature, uniform=uniform)
    accuracy = knn_accuracy(train, y, test, y2, k, temperature, uniform)
    assert accuracy.dtype == torch.float64
    for m in range(CELLS):
        classifier = KNeighborsClassifier(k, metric="cosine", weights=weights, algorithm="brute")
        expected = classifier.fit(train[m].double().numpy(), y.numpy()).predict(test[m].double().numpy())
        assert np.array_equal(actual[m].numpy(), expected)
        assert accuracy[m].item() == pytest.approx((expected == y2.numpy()).mean(), abs=1e-12)
    assert k == 203 or accuracy[0] < accuracy[2]  # more signal


@pytest.mark.parametrize(("chunk", "similarities"), [(7, 2**24), (4096, 10 * N2)])
def test_the_chunks_change_nothing(data, monkeypatch, chunk, similarities):
    train, y, test, _ = data
    expected = predicted(train, y, test)
    monkeypatch.setattr(knn, "CHUNK", chunk)
    monkeypatch.setattr(knn, "SIMILARITIES", similarities)
    assert torch.equal(predicted(train, y, test), expected)


@pytest.mark.parametrize("chunk", [1, 3, 10, 40])
def test_equally_near_samples_are_all_of_the_nearest(monkeypatch, chunk):
    """Forty copies of two directions, exactly alike: five of the nearer one, whichever they are."""
    monkeypatch.setattr(knn, "CHUNK", chunk)
    train = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(20, 1)
    similar, index = find_neighbours(train, torch.tensor([[2.0, 0.0], [0.0, 3.0]]), 5)
    assert (index % 2).tolist() == [[0] * 5, [1] * 5]
    assert all(len(set(row)) == 5 for row in index.tolist())
    assert (similar == 1).all()


def test_of_classes_with_equal_votes_the_smallest_wins():
    similar, labels = torch.ones(2, 4), torch.tensor([[3, 1, 3, 1], [2, 2, 0, 0]])
    assert vote(similar, labels, uniform=True).tolist() == [1, 0]


def test_lengths_and_precision_do_not_matter_and_zeros_do_not_crash(data):
    train, y, test, _ = data
    lengths = torch.logspace(-3, 3, N)[:, None]
    assert torch.equal(predicted(train * lengths, y, 100 * test), predicted(train, y, test))
    assert predicted(0 * train, y, 0 * test).shape == (CELLS, N2)
    half, half_test = train.bfloat16(), test.bfloat16()
    expected = predicted(half.float(), y, half_test.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(predicted(half, y, half_test), expected)


class Copies(TorchFunctionMode):
    """Notes which copies to another device or dtype do not wait until they are done."""

    def __init__(self) -> None:
        super().__init__()
        self.without_waiting: list[bool] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.to:
            self.without_waiting.append(bool(kwargs and kwargs.get("non_blocking")))
        return function(*args, **kwargs or {})


def test_only_a_copy_to_an_accelerator_does_not_wait(data):
    """The CPU would read the features of a GPU before they have arrived."""
    train, y, test, y2 = data
    with Copies() as copies:
        knn_accuracy(train, y, test, y2)
    assert len(copies.without_waiting) >= 1 + CELLS  # the labels, and the features of each grid point
    assert not any(copies.without_waiting)
    with Copies() as copies:
        find_neighbours(train[0], test[0].to("meta"), 5)
    assert any(copies.without_waiting)
