"""Training objective of the denoiser: times, targets, weightings and the loss.

With w_t = g(t)^2 / 2 and d = the mean over pixels of a squared difference (SiT, Ma et al. 2024; U-ViT: "none"):

    prediction   loss                        weighting W
    eps          W d(net, eps)               none        1
    score        W d(-sigma_t net, eps)      velocity    (w_t / sigma_t)^2
    x            d(net, x)                   likelihood  w_t / sigma_t^2
    velocity     d(net, v)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from uvit_decay.diffusion.noise_path import Batch, Interpolant, NoisePath, Times
from uvit_decay.runtime.errors import UserError

Prediction = Literal["eps", "x", "velocity", "score"]
Weighting = Literal["none", "velocity", "likelihood"]
Network = Callable[[Tensor, Tensor, Tensor | None], Tensor]

T_EPS = 1e-3  # SiT's distance, in training and sampling, to an end of the path where the prediction is undefined
VP_T_EPS = 1e-5  # SiT's distance in training to t = 0 where the velocity or the weight of a VP path is infinite


def check_loss(prediction: Prediction, weighting: Weighting = "none") -> None:
    """Raise a UserError if the prediction does not have this weighting."""
    if weighting != "none" and prediction in ("x", "velocity"):
        raise UserError(f"weighting {weighting!r} is for the predictions eps and score, not {prediction}: use 'none'")


def training_interval(path: NoisePath, prediction: Prediction, weighting: Weighting = "none") -> tuple[float, float]:
    """Return the interval of times on which the loss is finite, as in SiT.

    The losses of U-ViT, unweighted with predictions eps and x, have the whole interval [0, 1].
    """
    if isinstance(path, Interpolant):
        return (T_EPS, 1 - T_EPS) if prediction in ("eps", "score") else (0.0, 1.0)
    return (0.0, 1.0) if prediction in ("eps", "x") and weighting == "none" else (VP_T_EPS, 1.0)


def stratified_times(uniform: Times, first: int, total: int) -> Times:
    """Return stratified times t = (i + u_i) / total for positions i = first, first + 1, ... of a global batch.

    Over the shuffled data each t is uniform on [0, 1]; each batch covers all noise levels evenly, which lowers the
    variance of its loss.
    """
    positions = torch.arange(first, first + len(uniform), dtype=uniform.dtype, device=uniform.device)
    return (positions + uniform) / total


def training_times(path: NoisePath, prediction: Prediction, weighting: Weighting, uniform: Times) -> Times:
    """Map numbers uniform on [0, 1) to training times in `training_interval`."""
    low, high = training_interval(path, prediction, weighting)
    return path.times(low + (high - low) * uniform)


def _target(path: NoisePath, prediction: Prediction, x: Batch, eps: Batch, t: Times) -> Batch:
    """Return the target of the network's output, or of -sigma_t times a score."""
    if prediction == "velocity":
        return path.velocity(x, eps, t)
    return x if prediction == "x" else eps


def _weight(path: NoisePath, weighting: Weighting, t: Times) -> Times:
    """Return W of the module docstring, for a weighting other than "none"."""
    rate = 0.5 * path.diffusion2(t) / path.sigma(t)
    return rate.square() if weighting == "velocity" else rate / path.sigma(t)


def diffusion_loss(
    net: Network,
    path: NoisePath,
    prediction: Prediction,
    x: Batch,
    y: Tensor | None,
    t: Times,
    eps: Batch,
    weighting: Weighting = "none",
) -> Float[Tensor, " b"]:
    """Return the loss of the module docstring at x_t, one float32 value a sample.

    Raises:
        UserError: a weighting that this prediction does not have.
    """
    check_loss(prediction, weighting)
    out = net(path.add_noise(x, eps, t), t, y).float()
    if prediction == "score":
        out = path.eps_from_score(out, t)
    error = (out - _target(path, prediction, x, eps, t)).square().flatten(1).mean(dim=1)
    return error if weighting == "none" else _weight(path, weighting, t) * error
