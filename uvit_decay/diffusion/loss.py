"""What the network is taught: times, targets and the loss (U-ViT: unweighted mean squared error)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from uvit_decay.diffusion.path import Batch, Path, Times

Prediction = Literal["eps", "x"]
Network = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def stratified_times(uniform: Times, first: int, total: int) -> Times:
    """t = (i + u_i) / total for positions i = first, first + 1, ... of a global batch: uniform on [0, 1], low variance.

    Each t is uniform over the shuffled data, and one batch covers all noise levels evenly.
    """
    positions = uniform.new_tensor(range(first, first + len(uniform)))
    return (positions + uniform) / total


def diffusion_loss(
    net: Network, path: Path, prediction: Prediction, x: Batch, y: Tensor | None, t: Times, eps: Batch
) -> Float[Tensor, " b"]:
    """Squared error of the network's `prediction` of eps or x at x_t, mean over pixels; one float32 value a sample."""
    target = eps if prediction == "eps" else x
    error = net(path.noised(x, eps, t), t, y).float() - target
    return error.square().flatten(1).mean(dim=1)
