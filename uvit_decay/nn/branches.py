"""What the residual branches of a transformer do in a forward pass, seen by hooks that are there for that pass only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from uvit_decay.decay import branch_weights
from uvit_decay.nn.base import DecayedNet
from uvit_decay.nn.block import AdaLNBlock, Block
from uvit_decay.runtime.errors import UserError


class BranchNorms:
    """The root mean squares of x_k and of beta_k f_k, for every branch k of a network in its latest forward pass.

    x_k is what the norm of the branch reads, and beta f the rest of the sum: x_{k+1} - alpha_k x_k. Compiled blocks run
    as they are written meanwhile, since their graphs ignore hooks.
    """

    def __init__(self, net: DecayedNet) -> None:
        self.net, self.blocks = net, net.decayed_blocks()
        if not all(isinstance(block, Block | AdaLNBlock) for block in self.blocks.values()):
            raise UserError(f"a {type(net).__name__} has branches without norms: remove BranchNorms from the callbacks")
        self.x, self.f = ([0.0] * len(net.shortcuts.alphas) for _ in range(2))
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def start(self) -> None:
        """Register the hooks, unless they are."""
        for i, block in enumerate(self.blocks.values() if not self._handles else ()):
            for k, norm in ((2 * i, block.norm1), (2 * i + 1, block.norm2)):
                self._handles.append(norm.register_forward_pre_hook(partial(self._enter, k)))
            self._handles.append(block.register_forward_hook(partial(self._leave, 2 * i + 1)))
            block._compiled_call_impl, block._graph = None, block._compiled_call_impl

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for block in self.blocks.values():
            block._compiled_call_impl = block.__dict__.pop("_graph", block._compiled_call_impl)

    def _enter(self, k: int, norm: nn.Module, args: Sequence[Tensor]) -> None:
        x = args[0].detach()
        if k % 2:
            self._end(k - 1, x)
        self.x[k], self._state = _rms(x), x

    def _leave(self, k: int, block: nn.Module, args: object, out: Tensor) -> None:
        self._end(k, out.detach())
        del self._state

    def _end(self, k: int, x: Tensor) -> None:
        alpha = branch_weights(self.net, self.net.shortcuts, k).alpha
        self.f[k] = _rms(x - alpha * self._state)


@torch.no_grad()
def _rms(x: Tensor) -> Tensor:
    return x.float().square().mean().sqrt()
