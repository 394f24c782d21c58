"""The sizes that papers use, by name: build("uvit-s/2", alpha_min=0.7)."""

from __future__ import annotations

from typing import Any

from uvit_decay.errors import UserError
from uvit_decay.nn.uvit import UViT

UVIT_SIZES: dict[str, dict[str, Any]] = {  # the U-ViT paper's Table 1; depth + 1 blocks
    # name          width        depth        heads       final 3x3 convolution
    "uvit-s": dict(dim=512, depth=12, heads=8, conv=True),
    "uvit-s-deep": dict(dim=512, depth=16, heads=8, conv=True),
    "uvit-m": dict(dim=768, depth=16, heads=12, conv=True),
    "uvit-l": dict(dim=1024, depth=20, heads=16, conv=True),
    "uvit-h": dict(dim=1152, depth=28, heads=16, conv=False),
}


def build(name: str, alpha_min: float = 1.0, **options: Any) -> UViT:
    """The network `<size>/<patch size>`, for instance "uvit-m/2"; `options` are the other arguments of its class.

    Raises:
        UserError: unknown name.
    """
    size, _, patch = name.partition("/")
    if size not in UVIT_SIZES or not patch.isdigit():
        raise UserError(f"unknown network {name!r}: use <size>/<patch>, sizes {', '.join(UVIT_SIZES)}")
    return UViT(patch_size=int(patch), alpha_min=alpha_min, **UVIT_SIZES[size], **options)
