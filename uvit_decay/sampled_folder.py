"""Folders of samples with their metadata, sampling.json, so that an interrupted program can complete them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uvit_decay.runtime.download import checksum
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import remove_remains, replacing
from uvit_decay.runtime.plain import read_json

if TYPE_CHECKING:
    from uvit_decay.samples import Samples

ABOUT = "sampling.json"


def check_folder(folder: Path) -> None:
    """Raise a UserError if the folder is not empty and not a folder of samples."""
    if not (folder / ABOUT).exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise UserError(f"--out {folder}: the folder is not empty, and its files would be mixed with the new ones")


def missing(folder: Path, sampled: Samples, num: int) -> list[int]:
    """Start or continue a claimed folder of samples 0 to num - 1, and return the indices that are missing.

    Raises:
        UserError: the folder holds other files, samples made otherwise, or more of them.
    """
    check_folder(folder)
    about = json.loads(json.dumps({"sha256": checksum(sampled.ckpt), **sampled.describe()}))
    if (folder / ABOUT).exists():
        _check_same(folder, about)
        remove_remains(folder)
    else:
        with replacing(folder / ABOUT) as file:
            file.write(json.dumps(about, indent=1).encode())
    from uvit_decay.image_io import png_name

    there = {path.name for path in folder.glob("*.png")}
    wanted = [png_name(i) for i in range(num)]
    if more := there.difference(wanted):
        raise UserError(f"--out {folder}: it has images beyond --num {num}, such as {min(more)}: choose another folder")
    return [i for i, name in enumerate(wanted) if name not in there]


def _check_same(folder: Path, about: dict[str, Any]) -> None:
    found = read_json(folder / ABOUT, dict[str, object])
    for key in (*about, *found):
        here, there = about.get(key), found.get(key)
        if here != there and key != "checkpoint":  # the path may change: sha256 identifies the checkpoint
            raise UserError(f"--out {folder}: its images have {key} {there}, not {here}: choose another folder")
