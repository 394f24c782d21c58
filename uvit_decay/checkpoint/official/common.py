"""Official files of U-ViT and SiT: recognition, conversion from and to this project's networks.

Such a file is a bare state_dict without a description. Names and shapes determine the sizes; the published
configurations supply the rest (heads, null label, path, sampling) unless the caller's `ImportOptions` do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from uvit_decay.checkpoint.detect import SIT, UVIT, looks_like
from uvit_decay.checkpoint.official import sit, uvit
from uvit_decay.checkpoint.official.recognized import ImportOptions, OfficialState, RecognizedModel
from uvit_decay.nn.sit import SiT
from uvit_decay.nn.uvit import UViT
from uvit_decay.runtime.errors import UserError


class Family(NamedTuple):
    """A family of networks: name in messages, class, and the function that recognises its files."""

    name: str
    net: type[nn.Module]
    recognise: Callable[[OfficialState, ImportOptions], RecognizedModel]


FAMILIES = {UVIT: Family("U-ViT", UViT, uvit.recognise), SIT: Family("SiT", SiT, sit.recognise)}  # by the kind of file
MISSING_METADATA = ("num_classes", "null_label", "time_scale")
DECAY = ("alpha_min", "schedule", "granularity", "index", "branches")


def recognise(contents: Any, hints: ImportOptions, where: Path) -> RecognizedModel:
    """Return the network of an official file, given its `contents`; `where`, its path, is for error messages.

    Raises:
        UserError: another kind of file, names or shapes that are not those of its family, or hints that do not fit.
    """
    kind = looks_like(contents)
    if kind not in FAMILIES:
        raise UserError(f"{where} is no official U-ViT or SiT, it looks like {kind}")
    family = FAMILIES[kind]
    return family.recognise(OfficialState.of(contents, family.name, where), hints)


def bare_state(net: nn.Module, state: dict[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Return the official state_dict of `net`, a network of this project, with these weights.

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
    return OfficialState(own, family.name, where).fitting(net)


def missing_metadata(net: UViT | SiT, description: dict[str, Any], bare: dict[str, Tensor], where: Path) -> list[str]:
    """List what an importer of the exported state_dict `bare` would not find or guess, as strings "name value".

    The exported state_dict is recognised again, as an importer would, and the result is compared with `net` and
    `description`: every difference has to be passed on with the file.
    """
    # Heads and alpha_min are given because recognition can fail without them; both are listed below where needed.
    ours = net.config
    guessed = recognise(bare, ImportOptions(heads=ours["heads"], alpha_min=1.0), where)
    theirs, config = guessed.description(""), guessed.net.config
    # Arguments of the network that names and shapes of weights do not determine.
    found = [f"heads {ours['heads']}"] if guessed.size is None else []
    names = [name for name in MISSING_METADATA if name in ours and ours[name] != config[name]]
    if ours["alpha_min"] != 1.0:
        names += [name for name in DECAY if ours[name] != config[name]]
    elif ours.get("wiring") == "decayed":
        names.append("alpha_min")  # the importer requires it for this wiring
    found += [f"{name} {ours[name]}" for name in names]
    # Settings of training: predicted quantity, noise path, latent space.
    if description["prediction"] != theirs["prediction"]:
        found.append(f"prediction {description['prediction']}")
    if description["path"] != theirs["path"]:
        found.append(f"path {description['path']['class_path'].rpartition('.')[2]} {description['path']['init_args']}")
    for name in ("vae", "scale", "shift"):
        own = (description.get("latents") or {}).get(name)
        found += [f"{name} {own}"] if own != (theirs["latents"] or {}).get(name) else []
    return found
