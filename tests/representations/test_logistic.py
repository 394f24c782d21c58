"""Logistic regressions agree with scikit-learn, and never choose on the test set."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from uvit_decay.data import Digits
from uvit_decay.representations import logistic
from uvit_decay.representations.logistic import L2_GRID, logistic_grid

CLASSES = 4
GRID_FIELDS = ("held_out", "test", "l2", "every_test")


def labels(n, seed):
    return torch.randint(CLASSES, (n,), generator=torch.Generator().manual_seed(seed))


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def planted(n, y, strength, d=10, seed=0):
    """Return noise around a mean for each class."""
    return noise(n, d, seed=seed) + strength * noise(CLASSES, d, seed=99)[y]


def easy(strength=1.2, cells=1):
    y, y2 = labels(400, 1), labels(300, 2)
    train = torch.stack([planted(400, y, strength, seed=10 + m) for m in range(cells)])
    test = torch.stack([planted(300, y2, strength, seed=50 + m) for m in range(cells)])
    return train, y, test, y2


def scikit_learn(train, y, test, y2, l2):
    """Accuracy and weights, the bias last, of the standard solver on standardised features, converged."""
    train, test = train.double().numpy(), test.double().numpy()
    scaler = StandardScaler().fit(train)
    fitted = LogisticRegression(C=1 / l2, max_iter=5000, tol=1e-8).fit(scaler.transform(train), y.numpy())
    return fitted.score(scaler.transform(test), y2.numpy()), np.c_[fitted.coef_, fitted.intercept_]


def converged(x, y, penalties, iterations=200):
    """Return weights (m, r, k, d + 1) of standardised features, in their own coordinates."""
    frame = logistic.Frame.of(x)
    problem = logistic.Logistic(x, frame, y, torch.tensor(penalties), int(y.max()) + 1)
    w = logistic.minimise(problem, problem.start, iterations, 1e-6)
    return torch.cat([w[..., :-1] @ frame.axes.mT[:, None], w[..., -1:]], dim=-1)


def equal(one, other, cells=slice(None)):
    return all(torch.equal(getattr(one, name)[cells], getattr(other, name)) for name in GRID_FIELDS)


@pytest.fixture(scope="module")
def overlapping():
    """Grid points of mixed difficulty, correlated features of very different sizes, classes of uneven frequency."""
    y, y2 = labels(500, 1), labels(400, 2)
    y[:150], y2[:100] = 0, 0
    mix = noise(12, 12, seed=7) * torch.logspace(-2, 2, 12)
    cells = [
        [planted(len(part), part, s, 12, seed=20 + i) @ mix for part in (y, y2)] for i, s in enumerate((0.2, 0.6, 1.5))
    ]
    train, test = (torch.stack(side) for side in zip(*cells, strict=True))
    return train, y, test, y2


@pytest.mark.parametrize("logits", [logistic.LOGITS, 7 * 3 * 3 * CLASSES])  # seven samples at a time
def test_weights_are_scikit_learns(overlapping, monkeypatch, logits):
    monkeypatch.setattr(logistic, "LOGITS", logits)
    train, y, test, y2 = overlapping
    actual = converged(train, y, L2_GRID)
    for m in range(3):
        for r, l2 in enumerate(L2_GRID):
            expected = torch.from_numpy(scikit_learn(train[m], y, test[m], y2, l2)[1])
            ours = actual[m, r].double()
            ours[:, -1] -= ours[:, -1].mean()  # a bias common to all classes is nothing
            expected[:, -1] -= expected[:, -1].mean()
            assert (ours - expected).norm() < 0.01 * expected.norm()


def test_the_minimum_is_found_from_far_off(overlapping):
    """There, far off, the curvature has nothing to do with the one that preconditions."""
    train, y, _, _ = overlapping
    problem = logistic.Logistic(train, logistic.Frame.of(train), y, torch.tensor([1.0, 10.0]), CLASSES)
    expected = logistic.minimise(problem, problem.start, 300, 1e-6)
    actual = logistic.minimise(problem, 30 * noise(*expected.shape), 300, 1e-6)
    assert (actual - expected)[..., :-1].norm() < 0.01 * expected[..., :-1].norm()


def test_the_grid_agrees_with_scikit_learn_on_the_digits():
    """Pixels, and random features of them, few of which are constant: the default iterations, within a point."""
    data = Digits()
    data.load()
    y, y2 = data.train.labels, data.test.labels
    pixels, unseen = (part.images.flatten(1).float() for part in (data.train, data.test))
    maps = [torch.eye(64), *(noise(64, 64, seed=i) for i in range(3))]
    bias = [0.0, *(1000 * noise(64, seed=i) for i in range(3))]
    train, test = (torch.stack([(x @ a + b).relu() for a, b in zip(maps, bias, strict=True)]) for x in (pixels, unseen))
    scores = logistic_grid(train, y, test, y2)
    differences = [
        [scores.every_test[m, r].item() - scikit_learn(train[m], y, test[m], y2, l2)[0] for m in range(4)]
        for r, l2 in enumerate(L2_GRID[1:], start=1)
    ]
    assert np.abs(differences).mean() < 0.01
    assert scores.test.min() > 0.9


def test_the_grids_choice_never_sees_the_test_set(overlapping):
    train, y, test, y2 = overlapping
    scores = logistic_grid(train, y, test, y2)
    for other in (logistic_grid(train, y, noise(3, 50, 12), labels(50, 9)), logistic_grid(train, y, 1e6 * test, y2)):
        assert torch.equal(other.held_out, scores.held_out)
        assert torch.equal(other.l2, scores.l2)
        assert not torch.equal(other.test, scores.test)
    columns = [L2_GRID.index(l2) for l2 in scores.l2.tolist()]
    assert scores.test.tolist() == [
        row[column] for row, column in zip(scores.every_test.tolist(), columns, strict=True)
    ]


@pytest.mark.parametrize("cells", [1, 100])
def test_chunks_follow_the_budget_and_change_nothing(overlapping, monkeypatch, cells):
    train, y, test, y2 = overlapping
    expected = logistic_grid(train, y, test, y2)
    sizes, accuracies = [], logistic._accuracies
    monkeypatch.setattr(
        logistic, "_accuracies", lambda frame, x, *rest: sizes.append(len(x)) or accuracies(frame, x, *rest)
    )
    one = logistic._cell_bytes(len(y), len(y2), 12, CLASSES, len(L2_GRID))
    scores = logistic_grid(train, y, test, y2, budget=cells * one)
    assert max(sizes) == min(cells, 3)
    for name in GRID_FIELDS[:2]:  # sums over other shapes may turn a sample
        torch.testing.assert_close(getattr(scores, name), getattr(expected, name), rtol=0, atol=0.011)


def test_the_grid_is_deterministic_whatever_is_around_it(overlapping):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    scores = logistic_grid(*overlapping)
    assert torch.equal(torch.rand(3), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert equal(scores, logistic_grid(*overlapping))
    with torch.inference_mode():
        assert equal(scores, logistic_grid(*overlapping))


def test_useless_features_and_absent_classes_do_no_harm():
    train, y, test, y2 = easy()
    expected = logistic_grid(train, y, test, y2)
    for useless in (lambda x: 0 * x[..., :5] + 1e4, lambda x: x, lambda x: 0 * x):
        both = (torch.cat([x, useless(x)], dim=-1) for x in (train, test))
        scores = logistic_grid(next(both), y, next(both), y2)
        assert scores.test.item() == pytest.approx(expected.test.item(), abs=0.02)
    scores = logistic_grid(train, 3 * y + 2, test, 3 * y2 + 2)  # 8 of 12 classes have no sample
    assert scores.test.item() == pytest.approx(expected.test.item(), abs=0.02)
    scores = logistic_grid(torch.zeros_like(train), y, torch.zeros_like(test), y2)
    assert scores.test.item() == pytest.approx((y2 == y.bincount().argmax()).double().mean().item())
    alone = logistic_grid(train, y * 0, test, y2 * 0)
    assert alone.test.item() == 1.0
    scores = logistic_grid(*easy(strength=30.0), l2_grid=(1e-6, 1.0), iterations=(200, 200))  # separable classes
    assert (scores.every_test == 1).all()
