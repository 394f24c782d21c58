"""Classifier-free guidance as a wrapper: the same call as the network it wraps.

out = uncond + scale (cond - uncond); scale = 1 is no guidance. U-ViT's papers quote s = scale - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uvit_decay.diffusion.loss import Network
from uvit_decay.errors import UserError


class Guided:
    """net(x, t, y) with guidance, both halves in one batch of twice the size; nothing extra at scale = 1.

    `null_label` is the label that stands for "no class".
    """

    def __init__(self, net: Network, scale: float, null_label: int) -> None:
        self.net, self.scale, self.null_label = net, scale, null_label

    def __call__(self, x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        if self.scale == 1.0:
            return self.net(x, t, y)
        if y is None:
            raise UserError("guidance needs a label for each image")
        labels = torch.cat([y, torch.full_like(y, self.null_label)])
        cond, uncond = self.net(torch.cat([x, x]), torch.cat([t, t]), labels).chunk(2)
        return torch.lerp(uncond, cond, self.scale)
