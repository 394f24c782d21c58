"""Official files of U-ViT and SiT: what they are, what they tell, the way back.

Such a file is a bare state_dict that describes nothing. Names and shapes tell the sizes; the published configurations
tell the rest (heads, null label, path, sampling) where `Hints` from the caller do not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from uvit_decay.checkpoint import sit, uvit
from uvit_decay.checkpoint.foreign import Bare, Hints, Official
from uvit_decay.checkpoint.kinds import SIT, UVIT, looks_like
from uvit_decay.errors import UserError
from uvit_decay.nn.sit import SiT
from uvit_decay.nn.uvit import UViT


class Family(NamedTuple):
    """A family of networks: what messages call it, its class, and how its files are recognised."""

    name: str
    net: type[nn.Module]
    recognise: Callable[[Bare, Hints], Official]


FAMILIES = {UVIT: Family("U-ViT", UViT, uvit.recognise), SIT: Family("SiT", SiT, sit.recognise)}  # by what looks so
UNTOLD = ("num_classes", "null_label", "time_scale")
DECAY = ("alpha_min", "schedule", "granularity", "index", "branches")


def recognise(contents: Any, hints: Hints, where: Path) -> Official:
    """The network of an official file, from its `contents`; `where` it is from is for messages.

    Raises:
        UserError: another kind of file, names or shapes that are not those of its family, or hints that do not fit.
    """
    kind = looks_like(contents)
    if kind not in FAMILIES:
        raise UserError(f"{where} is no official U-ViT or SiT, it looks like {kind}")
    family = FAMILIES[kind]
    return family.recognise(Bare.of(contents, family.name, where), hints)


def bare_state(net: nn.Module, state: dict[str, Tensor], where: Path) -> dict[str, Tensor]:
    """The official state_dict of our network `net` with these weights.

    Raises:
        UserError: the official layout cannot express the network.
    """
    family = next((family for family in FAMILIES.values() if type(net) is family.net), None)
    if family is None:
        raise UserError(
            f"{where} holds a {type(net).__name__}, official layouts are for UViT and SiT: export .safetensors"
        )
    if net.shortcuts.learnable or set(net.shortcuts.betas) != {1.0}:
        raise UserError(
            f"{where} has the schedule {net.config['schedule']!r}, whose weights the official layout has no place for: "
            "export .safetensors"
        )
    own = {name: value.contiguous() for name, value in state.items() if name != "alphas"}
    return Bare(own, family.name, where).fitting(net)


def untold(net: UViT | SiT, description: dict[str, Any], bare: dict[str, Tensor], where: Path) -> list[str]:
    """What a bare state_dict does not tell of `net` and the rest of its `description`: names and values."""
    ours = net.config
    guessed = recognise(bare, Hints(heads=ours["heads"], alpha_min=1.0), where)
    theirs, config = guessed.description(""), guessed.net.config
    found = [f"heads {ours['heads']}"] if guessed.size is None else []
    names = [name for name in UNTOLD if name in ours and ours[name] != config[name]]
    if ours["alpha_min"] != 1.0:
        names += [name for name in DECAY if ours[name] != config[name]]
    elif ours.get("wiring") == "decayed":
        names.append("alpha_min")  # of which no reader takes 1 for granted
    found += [f"{name} {ours[name]}" for name in names]
    if description["prediction"] != theirs["prediction"]:
        found.append(f"prediction {description['prediction']}")
    if description["path"] != theirs["path"]:
        found.append(f"path {description['path']['class_path'].rpartition('.')[2]} {description['path']['init_args']}")
    for name in ("vae", "scale", "shift"):
        own = (description.get("latents") or {}).get(name)
        found += [f"{name} {own}"] if own != (theirs["latents"] or {}).get(name) else []
    return found
