"""Wrappers of a network that keep its interface net(x, t, y): guidance, compilation, counting of evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from uvit_decay.diffusion.prediction import Network
from uvit_decay.runtime.errors import UserError


class Guided:
    """Network net(x, t, y) with guidance: one evaluation on a batch of twice the size; at scale 1 the plain network.

    `null_label` is the label that means "no class". Only the first `channels` are guided, None for all of x; the
    official codes of SiT and DiT guide 3 of 4. A learned variance is that of the label. Both halves are combined in the
    precision of x, also for a network in half precision.
    """

    def __init__(self, net: Network, scale: float, null_label: int, channels: int | None = None) -> None:
        self.net, self.scale, self.null_label, self.channels = net, scale, null_label, channels

    def __call__(self, x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        if self.scale == 1.0:
            return self.net(x, t, y)
        if y is None:
            raise UserError("guidance needs a label for each image")
        labels = torch.cat([y, torch.full_like(y, self.null_label)])
        cond, uncond = self.net(torch.cat([x, x]), torch.cat([t, t]), labels).to(x).chunk(2)
        guided = torch.lerp(uncond, cond, self.scale)
        channels = x.shape[1] if self.channels is None else self.channels
        if channels >= guided.shape[1]:
            return guided
        return torch.cat([guided[:, :channels], cond[:, channels:]], dim=1)


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


class NFECounter:
    """Wrapper of a network, with the same call, that counts evaluations per image in `nfe`; a guided step is two."""

    def __init__(self, net: Network) -> None:
        self.net, self.nfe = net, 0

    def __call__(self, x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        self.nfe += len(x)
        return self.net(x, t, y)
