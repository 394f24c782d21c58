"""Optimizers that torch lacks: LARS (You, Gitman and Ginsburg 2017) as linear probes use it, and Muon with AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import AdamW, Optimizer
from torch.optim import Muon as MatrixMuon

MUON = "muon"  # in a group: whether its parameters are Muon's


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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                direction = p.grad  # biases and norms: plain momentum, no decay and no trust ratio
                if p.ndim >= 2:
                    direction = _scale(p, p.grad, group["weight_decay"], group["trust"])
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                state["momentum_buffer"].mul_(group["momentum"]).add_(direction)
                p.add_(state["momentum_buffer"], alpha=-group["lr"])
        return loss


def _scale(w: torch.Tensor, gradient: torch.Tensor, weight_decay: float, trust: float) -> torch.Tensor:
    """Return q d of the equation above, without waiting for the device."""
    direction = gradient.add(w, alpha=weight_decay)
    norm = w.norm()
    length = direction.norm()
    return direction * torch.where((norm > 0) & (length > 0), trust * norm / length, 1.0)


class Muon(Optimizer):
    """torch's Muon (Jordan et al. 2024), with steps as long as AdamW's, for groups with `muon`; AdamW for the others.

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
            True: MatrixMuon(matrices, lr, momentum=momentum, adjust_lr_fn="match_rms_adamw"),
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
