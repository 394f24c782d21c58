"""The closed-form probes of the training callback: exact, deterministic, and never choosing on the test set."""

import numpy as np
import pytest
import torch
from test_probe import CLASSES, easy, labels, noise, planted

from uvit_decay.metrics.probe import RIDGES, ProbeScores, logistic_probe, ridge_probe
from uvit_decay.randomness import generator


def numpy_ridge(train, y, test, y2, ridge):
    """(X'X + n ridge)^-1 X'Y on standardised features, the bias by centring the targets."""
    train, test, y, y2 = (np.asarray(a, dtype=np.float64) for a in (train, test, y, y2))
    mean, std = train.mean(0), train.std(0, ddof=1).clip(min=1e-6)
    x, x2 = (train - mean) / std, (test - mean) / std
    targets = np.eye(CLASSES)[y.astype(int)]
    gram = x.T @ x + len(x) * ridge * np.eye(x.shape[1])
    weights = np.linalg.inv(gram) @ x.T @ (targets - targets.mean(0))
    return float((np.argmax(x2 @ weights + targets.mean(0), axis=1) == y2).mean())


def generator_order(n):
    return torch.randperm(n, generator=generator("probe"))


def same(one: ProbeScores, other: ProbeScores):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("held_out", "test", "ridge"))


def test_a_signal_is_found_in_its_cell_only():
    y, y2 = labels(400, 1), labels(400, 2)
    train, test = noise(5, 400, 10, seed=3), noise(5, 400, 10, seed=4)
    train[3], test[3] = planted(400, y, 2.0, seed=5), planted(400, y2, 2.0, seed=6)
    scores = ridge_probe(train, y, test, y2)
    others = [0, 1, 2, 4]
    assert scores.test[3] > 0.95
    assert scores.held_out[3] > 0.95
    assert (scores.test[others] - 1 / CLASSES).abs().max() < 0.09  # 4 standard errors
    assert (scores.held_out[others] < 0.45).all()


def test_shuffled_labels_give_chance():
    train, y, test, y2 = easy(2.0)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    assert ridge_probe(train, y, test, y2).test.item() > 0.95
    assert ridge_probe(train, y[order], test, y2).test.item() < 0.45
    assert logistic_probe(train[0], y[order], test[0], y2) < 0.45


@pytest.mark.parametrize(("n", "d", "strength"), [(400, 10, 0.3), (400, 10, 0.8), (100, 70, 0.4), (61, 100, 0.5)])
def test_scores_are_those_of_an_independent_ridge_regression(n, d, strength):
    y, y2 = labels(n, 1), labels(500, 2)
    y[: n // 3], y2[:250] = 0, 0  # an uneven prior, which the bias must learn in full
    train = torch.stack([planted(n, y, strength, d, seed=10 + m) for m in range(4)])
    test = torch.stack([planted(500, y2, strength, d, seed=50 + m) for m in range(4)])
    scores = ridge_probe(train, y, test, y2)
    held, kept = generator_order(n).tensor_split([round(0.2 * n)])
    for m in range(4):
        tried = [numpy_ridge(train[m][kept], y[kept], train[m][held], y[held], ridge) for ridge in RIDGES]
        assert scores.held_out[m].item() == pytest.approx(max(tried), abs=1e-12)
        assert scores.ridge[m].item() == RIDGES[tried.index(max(tried))]
        wanted = numpy_ridge(train[m], y, test[m], y2, scores.ridge[m].item())
        assert scores.test[m].item() == pytest.approx(wanted, abs=1e-12)


def test_more_features_than_samples_need_more_ridge():
    """A weak signal in many features: the largest ridge generalises best, and the choice must see it."""
    y, y2 = labels(120, 1), labels(400, 2)
    train, test = planted(120, y, 0.25, d=100, seed=3)[None], planted(400, y2, 0.25, d=100, seed=4)[None]
    assert ridge_probe(train, y, test, y2).ridge.item() == max(RIDGES)


def test_ridge_and_logistic_probes_agree_on_easy_data():
    train, y, test, y2 = easy()
    scores = ridge_probe(train, y, test, y2)
    logistic = logistic_probe(train[0], y, test[0], y2)
    assert logistic > 0.8
    assert scores.test.item() == pytest.approx(logistic, abs=0.05)


def test_the_logistic_probe_is_a_converged_regression_on_standardised_features():
    train, y, test, y2 = easy(0.8)
    wanted = logistic_probe(train[0], y, test[0], y2)
    scale = torch.logspace(-4, 4, 10)
    assert logistic_probe(train[0] * scale + 7, y, test[0] * scale + 7, y2) == pytest.approx(wanted, abs=0.01)


def test_the_choice_never_sees_the_test_set():
    train, y, test, y2 = easy(0.3, cells=3)
    scores = ridge_probe(train, y, test, y2)
    for other in (
        ridge_probe(train, y, noise(3, 50, 10, seed=8), labels(50, 9)),
        ridge_probe(train, y, 1e6 * test, y2),
        ridge_probe(train, y, test.flip(1), y2),
    ):
        assert torch.equal(other.held_out, scores.held_out)
        assert torch.equal(other.ridge, scores.ridge)
        assert not torch.equal(other.test, scores.test)


def test_cells_do_not_see_one_another():
    train, y, test, y2 = easy(0.5, cells=4)
    scores = ridge_probe(train, y, test, y2)
    for m in range(4):
        alone = ridge_probe(train[m : m + 1], y, test[m : m + 1], y2)
        assert same(alone, ProbeScores(scores.held_out[m, None], scores.test[m, None], scores.ridge[m, None]))


def test_probing_is_deterministic_and_leaves_the_global_stream_alone():
    data = easy(0.5, cells=2)
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    first = ridge_probe(*data)
    assert torch.equal(torch.rand(3), wanted)
    assert same(first, ridge_probe(*data))


def test_scale_and_offset_of_features_do_not_matter():
    train, y, test, y2 = easy(0.5)
    wanted = ridge_probe(train, y, test, y2)
    scale, offset = torch.logspace(-3, 3, 10).double(), torch.linspace(-50, 50, 10).double()
    moved = ridge_probe(train * scale + offset, y, test * scale + offset, y2)
    assert moved.test.item() == pytest.approx(wanted.test.item(), abs=1e-2)
    assert moved.held_out.item() == pytest.approx(wanted.held_out.item(), abs=1e-2)


@pytest.mark.parametrize("kind", ["constant", "duplicated", "zero", "dead"])
def test_degenerate_features_do_not_crash(kind):
    train, y, test, y2 = easy()
    wanted = ridge_probe(train, y, test, y2)
    if kind == "dead":
        scores = ridge_probe(torch.zeros_like(train), y, torch.zeros_like(test), y2)
        most = y.bincount().argmax()
        assert scores.test.item() == pytest.approx((y2 == most).double().mean().item(), abs=1e-12)
        return
    useless = {"constant": lambda x: x[..., :5] * 0 + 1e4, "duplicated": lambda x: x, "zero": lambda x: 0 * x}[kind]
    scores = ridge_probe(torch.cat([train, useless(train)], -1), y, torch.cat([test, useless(test)], -1), y2)
    assert scores.test.item() == pytest.approx(wanted.test.item(), abs=0.02)
    assert scores.held_out.item() == pytest.approx(wanted.held_out.item(), abs=0.02)


def test_float32_features_are_solved_in_float64():
    train, y, test, y2 = easy(0.5, cells=2)
    scores = ridge_probe(train, y, test, y2)
    assert scores.test.dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert same(ridge_probe(train, y, test, y2), scores)
    assert same(ridge_probe(train.double(), y, test.double(), y2), scores)


def test_scores_have_one_value_a_cell_in_their_ranges():
    scores = ridge_probe(*easy(0.5, cells=3))
    for values in (scores.held_out, scores.test, scores.ridge):
        assert values.shape == (3,)
    for values in (scores.held_out, scores.test):
        assert (values >= 0).all()
        assert (values <= 1).all()
    assert set(scores.ridge.tolist()) <= set(RIDGES)
