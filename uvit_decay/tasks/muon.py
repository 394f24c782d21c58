"""Muon (Jordan et al. 2024) for the matrices of a network's blocks, AdamW for all else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim import Muon as MatrixMuon

from uvit_decay.nn.base import Residual
from uvit_decay.runtime.errors import UserError

MUON = "muon"  # in a group: whether its parameters are Muon's


def hidden_matrices(net: nn.Module) -> set[str]:
    """Return the names of the weights of linear layers in the residual blocks of `net`; a UserError without any."""
    blocks = [(name, block) for name, block in net.named_modules() if isinstance(block, Residual)]
    linears = ((f"{name}.{inner}", m) for name, block in blocks for inner, m in block.named_modules())
    found = {f"{name}.weight" for name, module in linears if isinstance(module, nn.Linear)}
    if not found:
        raise UserError(f"muon is for the matrices of blocks, of which a {type(net).__name__} has none: use adamw")
    return found


class Muon(Optimizer):
    """torch's Muon for the groups that say so, with steps as long as AdamW's, and AdamW for the others.

    Both take the groups and the state of this optimizer, so that one checkpoint and one schedule serve both.

    Args:
        params: groups with lr, weight_decay and `muon`; both kinds occur.
        lr: learning rate of groups that name none.
        betas: of AdamW.
        momentum: of Muon, Nesterov's.
    """

    def __init__(
        self, params: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], momentum: float
    ) -> None:
        matrices, others = ([group for group in params if group[MUON] == muon] for muon in (True, False))
        self.parts = {
            True: MatrixMuon(matrices, lr, momentum=momentum, adjust_lr_fn="match_rms_adamw"),
            False: AdamW(others, lr, betas, fused=True),
        }
        super().__init__(params, {"lr": lr})  # the groups, now with the settings of their part

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make a step with both; loading and schedules replace groups and state, which are handed to both anew."""
        loss = closure() if closure is not None else None
        for muon, part in self.parts.items():
            part.param_groups, part.state = [g for g in self.param_groups if g[MUON] == muon], self.state
            part.step()
        return loss
