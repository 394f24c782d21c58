"""Published network sizes by name: create_model("uvit-s/2", alpha_min=0.7)."""

from __future__ import annotations

from typing import Any

from uvit_decay.nn.mae import MAE
from uvit_decay.nn.sit import SiT
from uvit_decay.nn.uvit import UViT
from uvit_decay.nn.vit import ViT
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import check_types

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
VIT_SIZES: dict[str, dict[str, Any]] = {  # the ViT and MAE papers; the last two from the decay paper's Table 2
    "s": dict(dim=384, depth=12, heads=6),
    "b": dict(dim=768, depth=12, heads=12),
    "l": dict(dim=1024, depth=24, heads=16),
    "h": dict(dim=1280, depth=32, heads=16),
    "1024x12": dict(dim=1024, depth=12, heads=16),
    "768x18": dict(dim=768, depth=18, heads=12),
}


FAMILIES = (
    (UViT, UVIT_SIZES),
    (SiT, SIT_SIZES),
    (ViT, {f"vit-{name}": size for name, size in VIT_SIZES.items()}),
    (MAE, {f"mae-{name}": size for name, size in VIT_SIZES.items()}),
)


@check_types
def create_model(name: str, alpha_min: float = 1.0, **options: Any) -> UViT | SiT | ViT | MAE:
    """Return a network with one of the papers' sizes, in training mode, with random weights.

    Residual branches of denoisers are initialised to output 0 with and without decay; `zero_init=False` gives the
    official U-ViT. A ViT or MAE has the default initialisation of its class.

    Args:
        name: "<size>/<patch size>", for instance "uvit-m/2". Sizes are uvit-s, uvit-s-deep, uvit-m, uvit-l, uvit-h,
            sit-s, sit-b, sit-l, sit-xl, and for ViT and MAE vit-b or mae-b, with s, b, l, h, 1024x12 and 768x18.
        alpha_min: factor of the shortcut at the last block; 1 is the network without decay.
        options: other arguments of the class of the network, such as `image_size`.
    """
    size, _, patch = name.partition("/")
    known: list[str] = []
    for network, sizes in FAMILIES:
        if size in sizes and patch.isdecimal():
            start = {"zero_init": True} if network is UViT else {}
            arguments = sizes[size] | start | options
            return network(patch_size=int(patch), alpha_min=alpha_min, **arguments)
        known += sizes
    raise UserError(f"unknown network {name!r}; use <size>/<patch> with a size of {', '.join(known)}")
