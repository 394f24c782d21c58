"""Times and the loss, against hand computations."""

import pytest
import torch
from torch import nn

from uvit_decay.diffusion.loss import diffusion_loss, stratified_times
from uvit_decay.diffusion.path import VP
from uvit_decay.randomness import BatchRandom

PATH = VP()


def draws(count, total=None, first=0):
    return BatchRandom("times", 3, first=first, count=count, total=total or count).uniform()


@pytest.mark.parametrize("total", [1, 7, 30, 96, 1024])
def test_times_hit_every_stratum_once(total):
    t = stratified_times(draws(total), 0, total)
    assert t.dtype == torch.float32
    assert (t * total).floor().tolist() == list(range(total))
    assert t.min() >= 0
    assert t.max() < 1


@pytest.mark.parametrize("total", [7, 30, 96])
def test_a_draw_is_the_place_in_its_stratum(total):
    first = torch.arange(total).double()
    for u in (0.0, 0.5, 1 - 2**-12):
        t = stratified_times(torch.full((total,), u), 0, total).double()
        assert torch.allclose(t, (first + u) / total, atol=1e-7)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("total", [7, 30, 96])
def test_times_do_not_depend_on_sharding(total, ranks):
    whole = stratified_times(draws(total), 0, total)
    edges = [total * rank // ranks for rank in range(ranks + 1)]
    parts = [stratified_times(draws(b - a, total, a), a, total) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    assert torch.equal(torch.cat(parts), whole)


def test_times_are_uniform_over_many_batches():
    random = BatchRandom("times", first=0, count=16, total=16)
    t = torch.cat([stratified_times(random.uniform(), 0, 16) for _ in range(500)])
    counts = torch.histc(t, 40, 0, 1) / len(t)  # 2.5 bins a stratum
    assert (counts - 1 / 40).abs().max() < 0.005
    one = t.reshape(500, 16)[:, 5]
    assert one.mean().item() == pytest.approx(5.5 / 16, abs=0.004)


class Toy(nn.Module):
    """A convolution that also sees t and y."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x, t, y):
        return self.conv(x) + t[:, None, None, None] + (0 if y is None else y[:, None, None, None])


def batch(n=4):
    g = torch.Generator().manual_seed(1)
    x, eps = (torch.randn(n, 2, 6, 6, generator=g) for _ in range(2))
    return x, torch.arange(n) % 3, stratified_times(torch.rand(n, generator=g), 0, n), eps


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("prediction", ["eps", "x"])
def test_the_loss_is_the_mean_squared_error_of_each_sample(prediction, labelled):
    net, (x, y, t, eps) = Toy(), batch()
    y = y if labelled else None
    loss = diffusion_loss(net, PATH, prediction, x, y, t, eps)
    assert loss.shape == (4,)
    assert loss.dtype == torch.float32
    for i in range(4):
        abar = torch.exp(-(0.1 * t[i] + 9.95 * t[i] ** 2))
        x_t = abar.sqrt() * x[i] + (1 - abar).sqrt() * eps[i]
        out = net(x_t[None], t[i : i + 1], y[i : i + 1] if labelled else None)[0]
        target = {"eps": eps, "x": x}[prediction][i]
        wanted = sum((a - b) ** 2 for a, b in zip(out.flatten().tolist(), target.flatten().tolist(), strict=True)) / 72
        assert loss[i].item() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("prediction", ["eps", "x"])
def test_a_perfect_network_has_no_loss(prediction):
    x, y, t, eps = batch()

    def oracle(x_t, t, y):
        return PATH.noise_from_data(x_t, x, t) if prediction == "eps" else PATH.data_from_noise(x_t, eps, t)

    assert diffusion_loss(oracle, PATH, prediction, x, y, t, eps).max() < 1e-6


@pytest.mark.parametrize(("prediction", "wanted"), [("eps", 1.0), ("x", 0.25)])
def test_a_silent_network_has_the_power_of_its_target_as_loss(prediction, wanted):
    g = torch.Generator().manual_seed(2)
    x, eps = 0.5 * torch.randn(8, 3, 32, 32, generator=g), torch.randn(8, 3, 32, 32, generator=g)
    loss = diffusion_loss(lambda x, t, y: torch.zeros_like(x), PATH, prediction, x, None, torch.rand(8), eps)
    assert loss.mean().item() == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize("prediction", ["eps", "x"])
def test_the_loss_is_float32_under_bfloat16_autocast(prediction):
    net, (x, y, t, eps) = Toy(), batch()
    seen = []

    def watched(x_t, t, y):
        out = net(x_t, t, y)
        seen.append((x_t.dtype, net.conv(x_t).dtype))
        return out.bfloat16()

    exact = diffusion_loss(net, PATH, prediction, x, y, t, eps)
    with torch.autocast("cpu", torch.bfloat16):
        loss = diffusion_loss(watched, PATH, prediction, x, y, t, eps)
    assert seen == [(torch.float32, torch.bfloat16)], "autocast was on, and x_t was not rounded"
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, exact, rtol=0.02)
    assert not torch.equal(loss, loss.bfloat16().float())


def test_gradients_reach_the_network_only():
    net, (x, y, t, eps) = Toy(), batch()
    diffusion_loss(net, PATH, "eps", x, y, t, eps).mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())
    assert x.grad is None
