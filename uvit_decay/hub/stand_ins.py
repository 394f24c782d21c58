"""What self-contained files have in place of packages that they shall not need; see `uvit_decay.hub.bundle`."""

from __future__ import annotations

import math
import re

from torch import Tensor


class Float:
    """A tensor of floats in an annotation, Float[Tensor, "shape"], which is not checked here."""

    def __class_getitem__(cls, annotation: tuple[type, str]) -> type:
        return annotation[0]


class Int(Float):
    """The same for integers."""


class Int64(Float):
    """The same for int64."""


def rearrange(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    """Return the tensor with its axes split, permuted and merged, as by einops.

    Each side of `pattern` is a list of axes, such as "b (h p) w -> b h (p w)"; parentheses hold the parts of an axis.
    `sizes` has those that the shape does not tell, all but one of the parts of an axis.
    """
    before, after = (_axes(side) for side in pattern.split("->"))
    for size, parts in zip(x.shape, before, strict=True):
        known = math.prod(sizes.get(part, 1) for part in parts)
        sizes |= {part: size // known for part in parts if part not in sizes}
    parts_before = [part for parts in before for part in parts]
    order = [parts_before.index(part) for parts in after for part in parts]
    permuted = x.reshape([sizes[part] for part in parts_before]).permute(order)
    return permuted.reshape([math.prod(sizes[part] for part in parts) for parts in after])


def _axes(side: str) -> list[list[str]]:
    """Return the names of the parts of each axis."""
    return [parts.split() or [name] for parts, name in re.findall(r"\(([^)]*)\)|(\S+)", side)]
