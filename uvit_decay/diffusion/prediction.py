"""Predictions of networks: target and loss in training, (x, eps) from the output, times of training and sampling.

With w_t = g(t)^2 / 2, D = alpha_t sigma_t' - sigma_t alpha_t' and d = the mean over pixels of a squared difference:

    prediction   loss                        weighting W (SiT, Ma et al. 2024; U-ViT: "none")
    eps          W d(net, eps)               none        1
    score        W d(-sigma_t net, eps)      velocity    (w_t / sigma_t)^2 of eps and score
    x            W d(net, x)                             (D / max(sigma_t, 0.05))^2 of x
    velocity     d(net, v)                   likelihood  w_t / sigma_t^2 of eps and score

With weighting velocity each loss equals the loss of the velocity. For x on the linear path it is
d(net, x) / max(t, 0.05)^2, the loss of JiT (Li and He 2025, "Back to Basics: Let Denoising Generative Models Denoise").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from uvit_decay.diffusion.noise_path import Batch, Interpolant, NoisePath, Times
from uvit_decay.terminal.errors import UserError, check_choice, require_shape
from uvit_decay.terminal.typed import Needs, Within, check_types

Prediction = Literal["eps", "x", "velocity", "score"]
Weighting = Literal["none", "velocity", "likelihood"]
Network = Callable[[Tensor, Tensor, Tensor | None], Tensor]

T_EPS = 1e-3  # distance of SiT and U-ViT to an end of the path where the prediction is undefined
X_SIGMA = 0.05  # JiT's bound of the denominator of a velocity that is computed from x
VP_T_EPS = 1e-5  # SiT's distance in training to t = 0 where the velocity or the weight of a VP path is infinite


def target(path: NoisePath, prediction: Prediction, x: Batch, eps: Batch, t: Times) -> Batch:
    """Return the target of the network's output; for a score, the target of -sigma_t times the output."""
    check_choice(Prediction, prediction=prediction)
    if prediction == "velocity":
        return path.velocity(x, eps, t)
    if prediction == "x":
        return x
    return eps


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
        if prediction in ("eps", "score"):
            return T_EPS, 1 - T_EPS
        return 0.0, 1.0
    if prediction in ("eps", "x") and weighting == "none":
        return 0.0, 1.0
    return VP_T_EPS, 1.0


@check_types
@dataclass(frozen=True)
class TrainingTimes:
    """Distribution of the times of training, t = 1 noise.

    Args:
        kind: `uniform`, or `logit-normal`: the sigmoid of a normal number (SD3, Esser et al. 2024). JiT's distribution,
            with time 1 for data, has mean 0.8 and std 0.8 here.
        mean: mean of the normal number.
        std: standard deviation of the normal number, positive.
        shift: a of the time shift t' = a t / (1 + (a - 1) t), positive, 1 for no shift. SD3 uses sqrt(m / n) for images
            of m tokens, where images of n tokens need no shift.
    """

    NEEDS = {"mean": Needs("kind", "logit-normal"), "std": Needs("kind", "logit-normal")}
    kind: Literal["uniform", "logit-normal"] = "uniform"
    mean: Annotated[float, Within("(-inf, inf)")] = 0.0
    std: Annotated[float, Within("(0, inf)")] = 1.0
    shift: Annotated[float, Within("(0, inf)")] = 1.0

    def of(self, uniform: Times) -> Times:
        """Map numbers uniform on [0, 1) to numbers of this distribution in [0, 1], strata to strata."""
        t = uniform
        if self.kind == "logit-normal":
            t = torch.sigmoid(self.mean + self.std * torch.special.ndtri(uniform))
        if self.shift == 1.0:
            return t
        return self.shift * t / (1 + (self.shift - 1) * t)


UNIFORM = TrainingTimes()


def training_times(
    path: NoisePath, prediction: Prediction, weighting: Weighting, uniform: Times, times: TrainingTimes = UNIFORM
) -> Times:
    """Map numbers uniform on [0, 1) to training times in `training_interval`."""
    low, high = training_interval(path, prediction, weighting)
    return path.times(low + (high - low) * times.of(uniform))


def sampling_interval(path: NoisePath, prediction: Prediction, clip: bool) -> tuple[float, float]:
    """Return the first and the last time at which samplers evaluate the network, as in SiT.

    Only the velocity of an interpolant, without clipping, is defined at t = 0. If alpha_1 = 0, eps and the score at
    t = 1 do not determine x.
    """
    low, high = T_EPS, 1.0
    if isinstance(path, Interpolant):
        if prediction == "velocity" and not clip:
            low = 0.0
        if prediction in ("eps", "score"):
            high = 1 - T_EPS
    return low, high


def check_loss(prediction: Prediction, weighting: Weighting = "none") -> None:
    """Raise a UserError for an unknown prediction or weighting, or a prediction that does not have this weighting."""
    check_choice(Prediction, prediction=prediction)
    check_choice(Weighting, weighting=weighting)
    weighted_velocity = prediction == "velocity" and weighting != "none"
    if weighted_velocity or (prediction == "x" and weighting == "likelihood"):
        meant = "eps, score and x" if weighting == "velocity" else "eps and score"
        raise UserError(f"weighting {weighting!r} is for the predictions {meant}, not {prediction}; use 'none'")


def stratify_times(uniform: Times, first: int, total: int) -> Times:
    """Return stratified times t = (i + u_i) / total for positions i = first, first + 1, ... of a global batch.

    Each t is uniform on [0, 1] over the shuffled data. Each batch covers all noise levels evenly, which lowers the
    variance of the loss.
    """
    positions = torch.arange(first, first + len(uniform), dtype=uniform.dtype, device=uniform.device)
    return (positions + uniform) / total


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
    """Return the loss of the module docstring at x_t, one float32 value per sample.

    Args:
        net: the network net(x_t, t, y).
        path: the noise path.
        prediction: the quantity that the network predicts.
        x: images (b, c, h, w) of about [-1, 1].
        y: labels (b,) int64, or None.
        t: times (b,).
        eps: standard normal noise in the shape of x.
        weighting: W of the module docstring.
    """
    check_loss(prediction, weighting)
    x_t = path.add_noise(x, eps, t)
    out = net(x_t, t, y).float()
    require_shape(x.shape, network_output=out)
    if prediction == "score":
        out = path.eps_from_score(out, t)
    difference = out - target(path, prediction, x, eps, t)
    error = difference.square().flatten(1).mean(dim=1)
    if weighting == "none":
        return error
    if prediction == "x":
        determinant = path.alpha(t) * path.d_sigma_t(t) - path.sigma(t) * path.d_alpha_t(t)
        return (determinant / path.sigma(t).clamp(min=X_SIGMA)).square() * error
    rate = 0.5 * path.diffusion2(t) / path.sigma(t)
    if weighting == "velocity":
        return rate.square() * error
    return rate / path.sigma(t) * error
