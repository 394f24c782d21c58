"""Classifier-free guidance as a wrapper: the same call as the network it wraps.

out = uncond + scale (cond - uncond); scale = 1 is no guidance. U-ViT's papers quote s = scale - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uvit_decay.diffusion.loss import Network
from uvit_decay.errors import UserError


class Guided:
    """net(x, t, y) with guidance, both halves in one batch of twice the size; nothing extra where there is none.

    `null_label` is the label that stands for "no class". Only the first `channels` are guided, None for all; SiT's
    official code guides 3 of 4. Only t in `interval` is guided, both ends included (Kynkäänniemi et al. 2024).
    """

    def __init__(
        self,
        net: Network,
        scale: float,
        null_label: int,
        channels: int | None = None,
        interval: tuple[float, float] | None = None,
    ) -> None:
        self.net, self.scale, self.null_label, self.channels, self.interval = net, scale, null_label, channels, interval

    def __call__(self, x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        if self.scale == 1.0:
            return self.net(x, t, y)
        if y is None:
            raise UserError("guidance needs a label for each image")
        rows = self._guided_rows(t)
        labels = torch.cat([y, torch.full_like(y[rows], self.null_label)])
        cond, uncond = self.net(torch.cat([x, x[rows]]), torch.cat([t, t[rows]]), labels).split([len(x), len(x[rows])])
        guided = torch.lerp(uncond, cond[rows], self.scale)
        if self.interval is None and self.channels is None:
            return guided
        out = cond.clone()
        out[rows, : self.channels] = guided[:, : self.channels]
        return out

    def _guided_rows(self, t: Tensor) -> slice | Tensor:
        if self.interval is None:
            return slice(None)
        low, high = self.interval
        return ((low <= t) & (t <= high)).nonzero().squeeze(1)
