"""Log-likelihoods against Gaussians, whose density and velocity are known in closed form."""

import math

import pytest
import torch
from refusals import raises_user_error

from uvit_decay.diffusion.likelihood import log_likelihood, signs
from uvit_decay.diffusion.noise_path import GVP, VP, Linear, expand
from uvit_decay.diffusion.sampling import DiffusionModel

SHAPE = (1, 2, 2)
MEAN, STD = 0.3, 0.5
TURN = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))[0]
CORRELATED = TURN @ torch.diag(torch.tensor([0.3, 0.5, 0.8, 1.2])) @ TURN.T  # square root of a covariance


def velocity_of(path, root):
    """Return the exact velocity where the data are N(MEAN, root root^T): per eigenvector of the covariance."""
    variances, vectors = torch.linalg.eigh((root @ root.T).double())

    def net(x_t, t, y):
        alpha, sigma, d_alpha_t, d_sigma_t = (
            f(t.double())[:, None] for f in (path.alpha, path.sigma, path.d_alpha_t, path.d_sigma_t)
        )
        offset = (x_t.double().flatten(1) - alpha * MEAN) @ vectors
        gain = (alpha * d_alpha_t * variances + sigma * d_sigma_t) / (alpha**2 * variances + sigma**2)
        return (-(d_alpha_t * MEAN + (gain * offset) @ vectors.T)).to(x_t).reshape(x_t.shape)

    return net


def source(path, root):
    return DiffusionModel(velocity_of(path, root), path, "velocity", SHAPE, 0, False, torch.device("cpu"), pixels=False)


def images(count, root):
    noise = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return (MEAN + noise @ root.T).reshape(count, *SHAPE)


def exact(x, root):
    normal = torch.distributions.MultivariateNormal(torch.full((4,), MEAN), root @ root.T)
    return normal.log_prob(x.flatten(1))


@pytest.mark.parametrize("path", [Linear(), GVP(), VP()])
def test_the_likelihood_of_a_round_gaussian_is_exact(path):
    """Its Jacobian is a multiple of one, for which any draw of signs gives the trace; VP ends a little off N(0, I)."""
    root = STD * torch.eye(4)
    x = images(5, root)
    actual = log_likelihood(source(path, root), x, None, range(5), steps=100)
    assert torch.allclose(actual, exact(x, root), atol=0.022 if path == VP() else 0.002)


def test_draws_of_signs_are_right_on_average():
    x = images(1, CORRELATED).repeat(400, 1, 1, 1)
    actual = log_likelihood(source(Linear(), CORRELATED), x, None, range(400), steps=50)
    error = actual.std().item() / math.sqrt(400)
    assert error > 1e-3, "the trace is an estimate here"
    assert actual.mean().item() == pytest.approx(exact(x[:1], CORRELATED).item(), abs=4 * error)


def test_a_likelihood_depends_on_seed_and_index_but_not_on_its_batch():
    x, of = images(4, CORRELATED), source(Linear(), CORRELATED)
    whole = log_likelihood(of, x, None, [3, 1, 4, 5], seed=2, steps=20)
    assert torch.allclose(log_likelihood(of, x[2:3], None, [4], seed=2, steps=20), whole[2:3], atol=1e-4)
    assert torch.equal(log_likelihood(of, x, None, [3, 1, 4, 5], seed=2, steps=20), whole)
    assert not torch.allclose(log_likelihood(of, x, None, [3, 1, 4, 5], seed=3, steps=20), whole)


def test_labels_reach_the_network():
    inner = velocity_of(Linear(), STD * torch.eye(4))

    def net(x, t, y):
        return inner(x, t, y) + 0.2 * expand(y.to(x), x)

    of = DiffusionModel(net, Linear(), "velocity", SHAPE, 3, True, torch.device("cpu"), pixels=False)
    x = images(2, STD * torch.eye(4))
    one, other = (log_likelihood(of, x, labels, range(2), steps=20) for labels in ([0, 1], [0, 2]))
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_signs_are_fair_and_keyed():
    z = signs((3, 100, 100), 0, torch.arange(2))
    assert set(z.flatten().tolist()) == {-1.0, 1.0}
    assert z.mean(dim=(1, 2, 3)).abs().max().item() < 0.02
    assert torch.equal(z[1:], signs((3, 100, 100), 0, torch.tensor([1])))
    assert not torch.equal(z[0], z[1])
    assert not torch.equal(z, signs((3, 100, 100), 1, torch.arange(2)))


@pytest.mark.parametrize(
    ("changed", "fragments"),
    [
        ({"steps": 0}, ("steps", 0)),
        ({"indices": [0]}, ("indices", 1, 2)),
        ({"indices": [0, -1]}, ("indices[1]", -1)),
        ({"images": torch.zeros(2, 3, 2, 2)}, ("images", (2, 3, 2, 2))),
    ],
)
def test_other_arguments_give_no_density(changed, fragments):
    given = {"images": images(2, STD * torch.eye(4)), "labels": None, "indices": [0, 1]}
    of = DiffusionModel(
        velocity_of(Linear(), STD * torch.eye(4)), Linear(), "velocity", SHAPE, 2, True, torch.device("cpu")
    )
    with raises_user_error(*fragments):
        log_likelihood(of, **{**given, **changed})
