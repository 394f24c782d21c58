"""DINOv2 (Oquab et al., 2023) as an extractor, whose Frechet and kernel distances are known as FDD and KDD."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from uvit_decay.metrics.extractors import Extractor, Features
from uvit_decay.metrics.resize import DINOv2Protocol
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.precision import Precision, chosen_precision, computing

if TYPE_CHECKING:
    from uvit_decay.metrics.dinov2_net import DINOv2Net

LARGE = (1024, 24)  # width and depth of the network of all published numbers
_AT_ONCE = 16  # images in a batch on a CPU


class DINOv2(Extractor):
    """DINOv2's ViT-L/14 at 224x224: the 1024 numbers of the class token behind the final norm.

    Grey images are repeated to RGB. FDD is comparable only between equal protocols, which differ in the resizing:
    `dinov2-edm2` (EDM2) torch's antialiased bicubic on float pixels, `dinov2-dgm` (dgm-eval) Pillow's on uint8.
    Statistics of other weights are refused.

    Args:
        weights: file of the weights, in the layout of timm or of facebookresearch/dinov2; null means timm's file in the
            cache of the Hugging Face hub, downloaded (1.2 GB) if missing. A file of ViT-S/14 or B/14 is faster, and
            its numbers have the size in their name.
        protocol: how images are resized.
        compile: compile the network with torch.compile: true, or the name of a backend.
        precision: of the network; part of the name unless it is float32, in which published numbers are.
    """

    family = "dinov2"

    def __init__(
        self,
        weights: str | None = None,
        protocol: DINOv2Protocol = "dinov2-edm2",
        compile: bool | str = False,
        precision: Precision = "float32",
    ) -> None:
        if weights is not None and not Path(weights).is_file():
            raise UserError(f"the DINOv2 weights {weights} do not exist")
        self.weights, self.protocol, self.compile = weights, protocol, compile
        self.precision, self.tf32 = precision, precision == "tf32"
        self.name, self.widths = self._named(*LARGE), {"features": LARGE[0]}
        self.net: DINOv2Net | None = None

    def _named(self, dim: int, depth: int) -> str:
        size = "" if (dim, depth) == LARGE else f"-{dim}x{depth}"
        return f"{self.protocol}{size}" + ("" if self.precision == "float32" else f"-{self.precision}")

    def prepare(self, images: Tensor, labels: Tensor, device: torch.device) -> None:
        chosen_precision(self.precision, device)  # a UserError for one that the device lacks
        if self.net is None:
            from uvit_decay.metrics.dinov2_net import DINOv2Net, weights_file

            net = DINOv2Net(weights_file(self.weights), self.protocol)
            self.name, self.widths, self.sha256 = self._named(net.dim, net.depth), {"features": net.dim}, net.sha256
            if self.compile:
                net.vit.compile(backend="inductor" if self.compile is True else self.compile)
            self.net = net
        self.net.to(device)

    def extract(self, images: Tensor) -> Features:
        at_once = _AT_ONCE if images.device.type == "cpu" else max(len(images), 1)
        with computing(images.device, self.precision):
            return Features(torch.cat([self.net(part) for part in self.rgb(images).split(at_once)]))

    def missing(self) -> str | None:
        from uvit_decay.metrics.dinov2_net import REPOSITORY, is_cached

        return None if self.weights is not None or is_cached() else f"DINOv2's weights ({REPOSITORY})"

    def remark(self) -> str | None:
        return f"DINOv2's weights: sha256 {self.sha256} of names and values"
