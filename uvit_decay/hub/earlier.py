"""The files of a folder that an export may replace: the files of an earlier export.

An export writes model_index.json, README.md, a file of Python, `denoiser/` and, for latents, `vae/`. Its files are
recognised by these names, by the class in model_index.json, by a tag in README.md, and by the name of a file of Python,
which ends with the hash of its contents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from uvit_decay.checkpoint.io import AUTOENCODER, INDEX
from uvit_decay.hub.pipeline import CODE, COMPONENT, DecayPipeline, is_own_code
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import PARTIAL

README = "README.md"
TAG = "decayed-identity-shortcuts"  # in the metadata of every README.md that an export writes
OF_MODEL = ("config.json", "diffusion_pytorch_model.safetensors")  # files of diffusers in denoiser/ and vae/
MOST = 2**20  # bytes of an index or a README.md


def list_replaceable(target: Path) -> list[str]:
    """Return the names in the folder `target` that a new export replaces; an empty list for a new or empty folder.

    Raises:
        UserError: the folder is not empty and holds no earlier export, or a file that no export wrote has one of the
            names that exports use.
    """
    if not target.is_dir():
        return []
    if target.joinpath(PARTIAL).exists():
        _check_partial(target / PARTIAL)
    # A killed export leaves its index in PARTIAL until all other entries are in place.
    if not _is_own_index(target / INDEX) and not _is_own_index(target / PARTIAL / INDEX):
        visible = sorted(path.name for path in target.iterdir() if not path.name.startswith("."))
        if visible:
            raise UserError(f"{target} is not empty and holds no earlier export: choose another folder ({visible[0]})")
        return []
    for path in _find_foreign(target):
        raise _cannot_replace(path)
    names = [path.name for path in target.glob("*.py") if is_own_code(path)]
    for name in (INDEX, README, COMPONENT, AUTOENCODER):
        if (target / name).exists():
            names.append(name)
    return sorted(names)


def _cannot_replace(path: Path) -> UserError:
    return UserError(f"cannot replace {path}: no earlier export wrote it; move it, or choose another folder")


def _check_partial(partial: Path) -> None:
    """Raise a UserError for a folder PARTIAL with files that a killed export does not leave."""
    if not partial.is_dir():
        raise _cannot_replace(partial)
    for path in partial.rglob("*"):
        exported = path.name in (INDEX, README, *OF_MODEL) or CODE.fullmatch(path.stem)
        temporary = path.name.startswith(".") and path.name.endswith(".partial")
        if not path.is_dir() and not exported and not temporary:
            raise _cannot_replace(path)


def _find_foreign(target: Path) -> Iterator[Path]:
    """Yield the files that have names of an export, but were not written by one."""
    index = target / INDEX
    if index.exists() and not _is_own_index(index):
        yield index
    readme = target / README
    if readme.exists() and TAG not in _read_small(readme):
        yield readme
    for path in target.glob("*.py"):
        if CODE.fullmatch(path.stem) and not is_own_code(path):
            yield path
    for part in (target / COMPONENT, target / AUTOENCODER):
        if part.is_dir():
            for path in sorted(part.iterdir()):
                exported = path.name in OF_MODEL or is_own_code(path)
                if path.is_dir() or not exported:
                    yield path
        elif part.exists():
            yield part


def _is_own_index(path: Path) -> bool:
    """Return whether an export wrote this model_index.json."""
    try:
        index: Any = json.loads(_read_small(path))
    except (ValueError, RecursionError):
        return False
    if not isinstance(index, dict):
        return False
    match index.get("_class_name"):
        case [str(module), str(kind)]:
            return kind == DecayPipeline.__name__ and CODE.fullmatch(module) is not None
    return False


def _read_small(path: Path) -> str:
    """Return the text of a file of at most MOST bytes; an empty text for other files."""
    if not path.is_file() or path.stat().st_size > MOST:
        return ""
    return path.read_bytes().decode(errors="replace")
