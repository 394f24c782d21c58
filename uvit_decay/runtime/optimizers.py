"""Optimizers that torch lacks: LARS (You, Gitman and Ginsburg 2017) as linear probes use it, and Muon with AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

MUON = "muon"  # in a group: whether its parameters are Muon's
# Coefficients of the polynomial a x + b x^3 + c x^5, which takes singular values in (0, 1] to about 1 in five steps
NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)


class LARS(Optimizer):
    """Momentum SGD whose update of each matrix is rescaled to a fraction of the matrix's norm.

    For a tensor w of two or more dimensions with gradient g:

        d = g + weight_decay w,    q = trust |w| / |d|, and 1 if either norm is 0
        m <- momentum m + q d,     w <- w - lr m

    Biases and other 1-D tensors have d = g and q = 1: neither weight decay nor scaling. timm's Lars divides by
    |g| + weight_decay |w| instead of |d|, and also scales 1-D tensors.

    Args:
        params: parameters or groups of them.
        lr: learning rate, positive.
        momentum: decay rate of m, in [0, 1).
        weight_decay: not negative.
        trust: the fraction, positive.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return the loss of `closure`, or None without a closure."""
        loss = _evaluate(closure)
        for group, p, momentum in _with_momentum(self):
            direction = p.grad  # biases and norms: plain momentum, no decay and no trust ratio
            if p.ndim >= 2:
                direction = _scale(p, p.grad, group["weight_decay"], group["trust"])
            momentum.mul_(group["momentum"]).add_(direction)
            p.add_(momentum, alpha=-group["lr"])
        return loss


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of `closure`, which computes the gradients; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _with_momentum(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
    """Yield the group, each parameter that has a gradient, and its momentum, which starts at 0."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            state = optimizer.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            yield group, p, state["momentum_buffer"]


def _scale(w: torch.Tensor, gradient: torch.Tensor, weight_decay: float, trust: float) -> torch.Tensor:
    """Return q d of the equation above, without waiting for the device."""
    direction = gradient.add(w, alpha=weight_decay)
    norm = w.norm()
    length = direction.norm()
    return direction * torch.where((norm > 0) & (length > 0), trust * norm / length, 1.0)


def orthogonalise(matrix: torch.Tensor, dtype: torch.dtype, steps: int = 5) -> torch.Tensor:
    """Return about U V^T of the matrix U S V^T, by Newton-Schulz iterations in `dtype`.

    The singular values of the result are not 1 but from 0.7 to 1.2, as in torch's Muon.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T.to(dtype) if tall else matrix.to(dtype)
    x = x / x.norm().clamp(min=1e-7)  # now no singular value is above 1
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x


def orthogonal_dtype(device: torch.device) -> torch.dtype:
    """Return the type in which `orthogonalise` is fast: bfloat16 on GPUs, but float32 on CPUs.

    CPUs without bfloat16 instructions need thirty times longer in bfloat16, several times the rest of a training step.
    """
    return torch.float32 if device.type == "cpu" else torch.bfloat16


class MatrixMuon(Optimizer):
    """Muon with Nesterov momentum, for matrices: `torch.optim.Muon` with match_rms_adamw, but float32 on CPUs.

    For a matrix w (m, n) with gradient g, and R = 0.2 sqrt(max(m, n)), with which a step is as long as AdamW's:

        v <- momentum v + (1 - momentum) g
        w <- (1 - lr weight_decay) w - lr R orthogonal(momentum v + (1 - momentum) g)

    The filters of a convolution (outputs, inputs, height, width) are a matrix with a row for each output, as in Jordan
    et al.'s code; torch's Muon takes matrices alone.

    Args:
        params: groups of matrices and of filters, with lr and weight_decay.
        lr: learning rate of groups without `lr`.
        momentum: decay rate of v, in [0, 1).
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all matrices that have a gradient; return the loss of `closure`, or None without a closure."""
        loss = _evaluate(closure)
        for group, p, average in _with_momentum(self):
            average.lerp_(p.grad, 1 - group["momentum"])
            ahead = p.grad.lerp(average, group["momentum"]).flatten(1)
            direction = orthogonalise(ahead, orthogonal_dtype(p.device))
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(direction.reshape(p.shape), alpha=-group["lr"] * 0.2 * math.sqrt(max(ahead.shape)))
        return loss


class Muon(Optimizer):
    """Muon (Jordan et al. 2024), with steps as long as AdamW's, for groups with `muon`; AdamW for the others.

    Both take the groups and the state of this optimizer, so that one checkpoint and one schedule serve both.

    Args:
        params: groups with lr, weight_decay and `muon`; both kinds occur.
        lr: learning rate of groups without `lr`.
        betas: decay rates of AdamW's two moments.
        momentum: Nesterov momentum of Muon.
        fused: whether AdamW is one kernel for all of its parameters.
    """

    def __init__(
        self,
        params: Sequence[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        momentum: float,
        fused: bool = True,
    ) -> None:
        matrices = [group for group in params if group[MUON]]
        others = [group for group in params if not group[MUON]]
        self.parts = {
            True: MatrixMuon(matrices, lr, momentum),
            False: AdamW(others, lr, betas, fused=fused),
        }
        super().__init__(params, {"lr": lr})  # the groups, now with the settings of their part

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make a step with both optimizers, after handing them the current groups and state, which loading replaces."""
        loss = None
        if closure is not None:
            loss = closure()
        for muon, part in self.parts.items():
            part.param_groups = [group for group in self.param_groups if group[MUON] == muon]
            part.state = self.state
            part.step()
        return loss
