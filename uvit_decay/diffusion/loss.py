"""Training objective of the denoiser: stratified times, weightings and the loss.

With w_t = g(t)^2 / 2 and d = the mean over pixels of a squared difference (SiT, Ma et al. 2024; U-ViT: "none"):

    prediction   loss                        weighting W
    eps          W d(net, eps)               none        1
    score        W d(-sigma_t net, eps)      velocity    (w_t / sigma_t)^2
    x            d(net, x)                   likelihood  w_t / sigma_t^2
    velocity     d(net, v)
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from uvit_decay.diffusion.noise_path import Batch, NoisePath, Times
from uvit_decay.diffusion.prediction import Network, Prediction, Weighting, target
from uvit_decay.runtime.errors import UserError


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
