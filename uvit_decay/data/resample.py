"""Scale parts of a batch of images on its device, each image its own part, to one size: PIL's bicubic filter.

torch has no such operation: `grid_sample` uses another cubic (a = -0.75 for PIL's -0.5) and does not antialias.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS = 2**14  # weights are whole multiples of 1 / _STEPS, so that float32 sums of weights x 0..255 are exact


def resampled(
    images: Tensor, start: Tensor, length: Tensor, size: int, mirror: Tensor | None = None, inside: bool = True
) -> Tensor:
    """Return a part of each image, scaled to size x size: uint8 (b, c, size, size), as PIL's but for roundings.

    The result does not depend on the order of sums, thus neither on the batch size nor on the kernel that runs. Columns
    are scaled first; PIL scales rows first where that is cheaper, which matters where values are clipped in between.

    Args:
        images: uint8 (b, c, h, w).
        start: top and left of the parts in pixels, (b, 2) or (1, 2) for all.
        length: their heights and widths, likewise.
        size: height and width of the result.
        mirror: where this bool tensor (b,) is True, the result is mirrored (left to right).
        inside: the filter ends at the edges of the part, as if it were cropped before; else at those of the image.
    """
    rows, columns = (
        _weights(start[:, axis], length[:, axis], size, images.shape[2 + axis], inside) for axis in range(2)
    )
    if mirror is not None:
        columns = torch.where(mirror[:, None, None], columns.flip(1), columns)
    wide = torch.einsum("bchw,bow->bcho", images.float(), columns.expand(len(images), -1, -1))
    wide = wide.round_().clamp_(0, 255)  # as PIL, which makes bytes of each pass
    scaled = torch.einsum("bcho,bph->bcpo", wide, rows.expand(len(images), -1, -1))
    return scaled.round_().clamp_(0, 255).to(torch.uint8)


def _weights(start: Tensor, length: Tensor, size: int, total: int, inside: bool) -> Tensor:
    """Return the weights of `total` pixels in each of `size` new ones: float32 (b, size, total), rows of sum 1."""
    start, length = start.float()[:, None, None], length.float()[:, None, None]
    scale = length / size
    centre = start + (torch.arange(size, device=start.device)[:, None] + 0.5) * scale
    pixel = torch.arange(total, device=start.device) + 0.5
    x = ((pixel - centre) / scale.clamp(min=1.0)).abs()  # antialiasing: a wider filter where the image shrinks
    weights = torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2) * (x < 2)
    if inside:
        weights *= (pixel > start) & (pixel < start + length)
    weights /= weights.sum(2, keepdim=True)
    return weights.mul_(_STEPS).round_().div_(_STEPS)
