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
    official code guides 3 of 4. What a network in half precision says is combined in the precision of x.
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
        if self.channels is None:
            return guided
        return torch.cat([guided[:, : self.channels], cond[:, self.channels :]], dim=1)
