"""What a network predicts: its target in training, (x, eps) of its output, and the times at which both are finite.

prediction   the output is compared with
eps          eps
score        -eps / sigma_t, both multiplied by -sigma_t
x            x
velocity     v = -(alpha_t' x + sigma_t' eps)
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


def target(path: NoisePath, prediction: Prediction, x: Batch, eps: Batch, t: Times) -> Batch:
    """Return the target of the network's output, or of -sigma_t times a score."""
    if prediction == "velocity":
        return path.velocity(x, eps, t)
    return x if prediction == "x" else eps


def x_eps_from_output(path: NoisePath, prediction: Prediction, x_t: Batch, out: Batch, t: Times) -> tuple[Batch, Batch]:
    """Return (x, eps) of x_t from the network's output."""
    if prediction == "velocity":
        return path.x_eps_from_velocity(x_t, out, t)
    if prediction == "x":
        return out, path.eps_from_x(x_t, out, t)
    eps = path.eps_from_score(out, t) if prediction == "score" else out
    return path.x_from_eps(x_t, eps, t), eps


def training_interval(path: NoisePath, prediction: Prediction, weighting: Weighting = "none") -> tuple[float, float]:
    """Return the interval of times on which the loss is finite, as in SiT.

    The losses of U-ViT, unweighted with predictions eps and x, have the whole interval [0, 1].
    """
    if isinstance(path, Interpolant):
        return (T_EPS, 1 - T_EPS) if prediction in ("eps", "score") else (0.0, 1.0)
    return (0.0, 1.0) if prediction in ("eps", "x") and weighting == "none" else (VP_T_EPS, 1.0)


def training_times(path: NoisePath, prediction: Prediction, weighting: Weighting, uniform: Times) -> Times:
    """Map numbers uniform on [0, 1) to training times in `training_interval`."""
    low, high = training_interval(path, prediction, weighting)
    return path.times(low + (high - low) * uniform)


def sampling_interval(path: NoisePath, prediction: Prediction, clip: bool) -> tuple[float, float]:
    """Return the first and the last time at which samplers evaluate the network, as in SiT.

    Only the velocity of an interpolant, without clipping, is defined at t = 0. Where alpha_1 = 0, eps and the score
    at t = 1 do not determine x.
    """
    interpolant = isinstance(path, Interpolant)
    low = 0.0 if interpolant and prediction == "velocity" and not clip else T_EPS
    return low, 1 - T_EPS if interpolant and prediction in ("eps", "score") else 1.0


def check_loss(prediction: Prediction, weighting: Weighting = "none") -> None:
    """Raise a UserError if the prediction does not have this weighting."""
    if weighting != "none" and prediction in ("x", "velocity"):
        raise UserError(f"weighting {weighting!r} is for the predictions eps and score, not {prediction}: use 'none'")


def stratified_times(uniform: Times, first: int, total: int) -> Times:
    """Return stratified times t = (i + u_i) / total for positions i = first, first + 1, ... of a global batch.

    Over the shuffled data each t is uniform on [0, 1]; each batch covers all noise levels evenly, which lowers the
    variance of its loss.
    """
    positions = torch.arange(first, first + len(uniform), dtype=uniform.dtype, device=uniform.device)
    return (positions + uniform) / total


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
    """Return the loss of the module docstring at x_t, one float32 value a sample."""
    check_loss(prediction, weighting)
    out = net(path.add_noise(x, eps, t), t, y).float()
    if prediction == "score":
        out = path.eps_from_score(out, t)
    error = (out - target(path, prediction, x, eps, t)).square().flatten(1).mean(dim=1)
    return error if weighting == "none" else _weight(path, weighting, t) * error
