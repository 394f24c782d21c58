"""Denoiser that samplers integrate, built from a network and a noise path, and wrappers: guided, compiled, counted.

Samplers run from t = 1, noise, to t = 0, data, so that a step from `now` to `after` adds (now - after) velocity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.diffusion.prediction import T_EPS, Network, Prediction, x_eps_from_output
from uvit_decay.runtime.constants import TIME_ROUNDING
from uvit_decay.terminal.errors import UserError, require_shape

DenoiseFn = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
Noise = Callable[[int], Tensor]  # step index -> standard normal noise in the shape of the states
Trajectory = Iterator[tuple[float, Tensor]]


@dataclass(frozen=True)
class Denoiser:
    """Denoiser on a noise path: (x_t, t) -> (x, eps) with x_t = alpha_t x + sigma_t eps, for `low` <= t <= `high`.

    Args:
        fn: the function (x_t, t) -> (x, eps), or (x, eps, v) with a learned variance, see `ode.dit_ddpm`.
        path: the noise path.
        low: first time, at the end of data.
        high: last time, at the end of noise.
        plain: function without guidance that replaces `fn` outside of the interval `guided`.
        guided: closed interval of times.
    """

    fn: DenoiseFn
    path: NoisePath
    low: float = T_EPS
    high: float = 1.0
    plain: DenoiseFn | None = None
    guided: tuple[float, float] = (0.0, 1.0)

    def denoise(self, x: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return (data, noise) of the states x at `time`, with one network evaluation."""
        data, eps, *_ = self.evaluate(x, time)
        return data, eps

    def evaluate(self, x: Tensor, time: float) -> tuple[Tensor, ...]:
        """Return (data, noise) of the states x at `time`, or (data, noise, v) with a learned variance."""
        # `time` is a float on the host, so this comparison does not wait for the device.
        guided = self.guided[0] - TIME_ROUNDING <= time <= self.guided[1] + TIME_ROUNDING
        fn = self.fn
        if self.plain is not None and not guided:
            fn = self.plain
        return fn(x, times_like(x, time))

    def velocity(self, x: Tensor, time: float) -> Tensor:
        """Return the velocity of the probability flow towards the data, with one network evaluation."""
        data, eps = self.denoise(x, time)
        return self.path.velocity(data, eps, times_like(x, time))


def denoise_fn(
    net: Network, path: NoisePath, prediction: Prediction, y: Tensor | None, clip: bool, learned_variance: bool = False
) -> DenoiseFn:
    """Return the denoiser (x_t, t) -> (x, eps) of a network; `clip` clamps x to [-1, 1] and computes eps from it.

    With `learned_variance` the network returns twice the channels of x_t; the second half is v: (x, eps, v).
    """

    def denoise(x_t: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        out = net(x_t, t, y).to(x_t)
        channels = x_t.shape[1]
        outputs = 2 * channels if learned_variance else channels
        require_shape((len(x_t), outputs, *x_t.shape[2:]), network_output=out)
        x, eps = x_eps_from_output(path, prediction, x_t, out[:, :channels], t)
        if clip:
            x = x.clamp(-1, 1)
            eps = path.eps_from_x(x_t, x, t)
        if learned_variance:
            return x, eps, out[:, channels:]
        return x, eps

    return denoise


def autoguide(good: DenoiseFn, bad: DenoiseFn, scale: float, path: NoisePath, clip: bool) -> DenoiseFn:
    """Return the denoiser D = D_bad + scale (D_good - D_bad) of two denoisers on the same path, for the same labels.

    Source: Karras et al. 2024, "Guiding a Diffusion Model with a Bad Version of Itself". Both return (x, eps) without
    clipping, so their networks may predict different quantities. `clip` clamps the combined x to [-1, 1].
    """

    def denoise(x_t: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        x_good, eps_good, *variance = good(x_t, t)
        x_bad, eps_bad, *_ = bad(x_t, t)
        x = torch.lerp(x_bad, x_good, scale)
        if clip:
            x = x.clamp(-1, 1)
            eps = path.eps_from_x(x_t, x, t)
        else:
            eps = torch.lerp(eps_bad, eps_good, scale)
        return x, eps, *variance

    return denoise


def times_like(x: Tensor, time: float) -> Tensor:
    """Return `time` for each sample of x, (b,) in the dtype and on the device of x."""
    return torch.full((len(x),), time, device=x.device, dtype=x.dtype)


def linspace(high: float, low: float, count: int) -> list[float]:
    """Return `count` equally spaced times from `high` to `low`."""
    return torch.linspace(high, low, count, dtype=torch.float64, device="cpu").tolist()


# ---- wrappers of a network that keep its interface net(x, t, y)


class Guided:
    """Network net(x, t, y) with guidance: one evaluation on a batch of twice the size; at scale 1 the plain network.

    A learned variance is taken from the labelled prediction. The halves are combined in the precision of x, also for a
    network in half precision.

    Args:
        net: the network.
        scale: w of uncond + w (cond - uncond).
        null_label: the label that means "no class".
        channels: number of first channels to guide; None means all. The official codes of SiT and DiT guide 3 of 4.
    """

    def __init__(self, net: Network, scale: float, null_label: int, channels: int | None = None) -> None:
        self.net = net
        self.scale = scale
        self.null_label = null_label
        self.channels = channels

    def __call__(self, x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        if self.scale == 1.0:
            return self.net(x, t, y)
        if y is None:
            raise UserError("guidance needs a label for each image")
        labels = torch.cat([y, torch.full_like(y, self.null_label)])
        out = self.net(torch.cat([x, x]), torch.cat([t, t]), labels)
        cond, uncond = out.to(x).chunk(2)
        guided = torch.lerp(uncond, cond, self.scale)
        channels = x.shape[1] if self.channels is None else self.channels
        return torch.cat([guided[:, :channels], cond[:, channels:]], dim=1)


class CompiledNet:
    """Network compiled by torch.compile, with the same call: one graph for all batches of two or more images.

    A smaller last batch, or guidance in an interval, does not compile again. `backend` is passed to torch.compile.
    """

    def __init__(self, net: Network, backend: str | Callable[..., Any] = "inductor") -> None:
        self.net = torch.compile(net, backend=backend)

    def __call__(self, x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        torch._dynamo.maybe_mark_dynamic(x, 0)
        torch._dynamo.maybe_mark_dynamic(t, 0)
        if y is not None:
            torch._dynamo.maybe_mark_dynamic(y, 0)
        return self.net(x, t, y)


class NFECounter:
    """Network with the same call that counts evaluations per image in `nfe`; a guided step counts twice."""

    def __init__(self, net: Network) -> None:
        self.net = net
        self.nfe = 0

    def __call__(self, x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        self.nfe += len(x)
        return self.net(x, t, y)
