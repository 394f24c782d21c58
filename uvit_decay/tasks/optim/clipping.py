"""Clipping of the gradient, whose norm is computed once, sharded or not."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from uvit_decay.tasks.parallel.sharding import full_tensor


def clip(optimizer: Optimizer, bound: float, algorithm: str, needs_norm: bool) -> Tensor | None:
    """Clip the gradient in place.

    Args:
        optimizer: holds the parameters, which may be sharded.
        bound: largest norm or magnitude, as `algorithm` says; 0 clips nothing.
        algorithm: `norm` of the whole gradient, or `value`, the magnitude of each number.
        needs_norm: compute the norm even if clipping does not need it.

    Returns:
        the norm before clipping, the same on all ranks, a scalar on the device; None if it was not computed.
    """
    parts = _split_parameters(optimizer)
    by_norm = bound > 0 and algorithm == "norm"
    norm = None
    if by_norm or needs_norm:
        norms = []
        for part in parts:
            gradients = [parameter.grad for parameter in part]
            norms.append(full_tensor(get_total_norm(gradients)))
        norm = norms[0] if len(norms) == 1 else get_total_norm(norms)
    if bound <= 0:
        return norm
    for part in parts:
        if by_norm:
            clip_grads_with_norm_(part, bound, norm)
        else:
            clip_grad_value_(part, bound)
    return norm


def _split_parameters(optimizer: Optimizer) -> list[list[Tensor]]:
    """Return the parameters with gradients in up to two lists, unsharded and sharded: torch takes no mixed lists."""
    unsharded: list[Tensor] = []
    sharded: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if isinstance(parameter, DTensor):
                sharded.append(parameter)
            else:
                unsharded.append(parameter)
    return [part for part in (unsharded, sharded) if part]
