"""A network compiled for sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from uvit_decay.diffusion.prediction import Network


class CompiledNet:
    """Wrapper of a network, with the same call, by torch.compile: one graph for all batches of two or more images.

    So neither a last, smaller batch nor guidance at some times compiles again. `backend` is as for torch.compile.
    """

    def __init__(self, net: Network, backend: str | Callable[..., Any] = "inductor") -> None:
        self.net = torch.compile(net, backend=backend)

    def __call__(self, x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        for tensor in (x, t) if y is None else (x, t, y):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self.net(x, t, y)
