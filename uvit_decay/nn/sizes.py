"""Published network sizes by name: create_model("uvit-s/2", alpha_min=0.7)."""

from __future__ import annotations

from typing import Any

from uvit_decay.nn.mae import MAE
from uvit_decay.nn.sit import SiT
from uvit_decay.nn.uvit import UViT
from uvit_decay.nn.vit import ViT
from uvit_decay.runtime.errors import UserError

UVIT_SIZES: dict[str, dict[str, Any]] = {  # the U-ViT paper's Table 1; depth + 1 blocks
    "uvit-s": dict(dim=512, depth=12, heads=8, conv=True),
    "uvit-s-deep": dict(dim=512, depth=16, heads=8, conv=True),
    "uvit-m": dict(dim=768, depth=16, heads=12, conv=True),
    "uvit-l": dict(dim=1024, depth=20, heads=16, conv=True),
    "uvit-h": dict(dim=1152, depth=28, heads=16, conv=False),
}
SIT_SIZES: dict[str, dict[str, Any]] = {  # the sizes of DiT
    "sit-s": dict(dim=384, depth=12, heads=6),
    "sit-b": dict(dim=768, depth=12, heads=12),
    "sit-l": dict(dim=1024, depth=24, heads=16),
    "sit-xl": dict(dim=1152, depth=28, heads=16),
}
VIT_SIZES: dict[str, dict[str, Any]] = {  # the ViT and MAE papers; the last two are of the decay paper's Table 2
    "s": dict(dim=384, depth=12, heads=6),
    "b": dict(dim=768, depth=12, heads=12),
    "l": dict(dim=1024, depth=24, heads=16),
    "h": dict(dim=1280, depth=32, heads=16),
    "1024x12": dict(dim=1024, depth=12, heads=16),
    "768x18": dict(dim=768, depth=18, heads=12),
}
CLASSES = (  # class, its sizes, and arguments that are the same for every alpha_min
    (UViT, UVIT_SIZES, {"zero_init": True}),
    (SiT, SIT_SIZES, {}),
    (ViT, {f"vit-{name}": size for name, size in VIT_SIZES.items()}, {}),
    (MAE, {f"mae-{name}": size for name, size in VIT_SIZES.items()}, {}),
)


def create_model(name: str, alpha_min: float = 1.0, **options: Any) -> UViT | SiT | ViT | MAE:
    """Return the network `<size>/<patch size>`, for instance "uvit-m/2"; `options` are other arguments of its class.

    Residual branches of denoisers are initialised to output 0 with and without decay; `zero_init=False` gives the
    official U-ViT. Those of a ViT or MAE have the initialisation of its class.
    """
    size, _, patch = name.partition("/")
    for net, sizes, start in CLASSES:
        if size in sizes and patch.isdecimal():
            return net(patch_size=int(patch), alpha_min=alpha_min, **sizes[size] | start | options)
    known = [size for _, sizes, _ in CLASSES for size in sizes]
    raise UserError(f"unknown network {name!r}: use <size>/<patch>, sizes {', '.join(known)}")
