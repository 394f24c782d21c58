"""Which files of a folder an export may replace: those of an earlier export, known by its index and their exact names.

An export writes model_index.json, README.md, a file of Python, `denoiser/` and, for latents, `vae/`. The name of a file
of Python ends with the hash of its contents, and README.md has tags that only exports write.
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


def replaceable(target: Path) -> list[str]:
    """Return the names in the folder `target` that a new export replaces; it is empty for a new or an empty folder.

    Raises:
        UserError: the folder is not empty and holds no earlier export, or one of the names that exports use is taken
            by a file that no export wrote.
    """
    if not target.is_dir():
        return []
    if target.joinpath(PARTIAL).exists():
        _check_partial(target / PARTIAL)
    # A killed export leaves its index in PARTIAL until all other entries are in place.
    if not any(_is_own_index(folder / INDEX) for folder in (target, target / PARTIAL)):
        visible = sorted(path.name for path in target.iterdir() if not path.name.startswith("."))
        if visible:
            raise UserError(f"{target} is not empty and holds no earlier export: choose another folder ({visible[0]})")
        return []
    foreign = next(_foreign(target), None)
    if foreign is not None:
        raise UserError(f"cannot replace {foreign}: no earlier export wrote it; move it, or choose another folder")
    code = [path.name for path in target.glob("*.py") if is_own_code(path)]
    names = [name for name in (INDEX, README, COMPONENT, AUTOENCODER) if (target / name).exists()]
    return sorted([*code, *names])


def _check_partial(partial: Path) -> None:
    """Raise a UserError for a folder PARTIAL that holds other files than a killed export may leave."""
    known = {INDEX, README, *OF_MODEL}
    paths = [partial] if not partial.is_dir() else [path for path in partial.rglob("*") if not path.is_dir()]
    for path in paths:
        temporary = path.name.startswith(".") and path.name.endswith(".partial") and path != partial
        if path.name not in known and not CODE.fullmatch(path.stem) and not temporary:
            raise UserError(f"cannot replace {path}: no earlier export wrote it; move it, or choose another folder")


def _foreign(target: Path) -> Iterator[Path]:
    """Yield the files at the names of an export that no export wrote."""
    index, readme = target / INDEX, target / README
    if index.exists() and not _is_own_index(index):
        yield index
    if readme.exists() and TAG not in _text(readme):
        yield readme
    for path in target.glob("*.py"):
        if CODE.fullmatch(path.stem) and not is_own_code(path):
            yield path
    for part in (target / COMPONENT, target / AUTOENCODER):
        if part.exists() and not part.is_dir():
            yield part
        for path in sorted(part.iterdir()) if part.is_dir() else ():
            if path.is_dir() or not (path.name in OF_MODEL or is_own_code(path)):
                yield path


def _is_own_index(path: Path) -> bool:
    """Return whether a model_index.json is that of an export."""
    try:
        index: Any = json.loads(_text(path))
    except (ValueError, RecursionError):
        return False
    named = index.get("_class_name") if isinstance(index, dict) else None
    if not isinstance(named, list) or len(named) != 2 or not all(isinstance(name, str) for name in named):
        return False
    module, kind = named
    return kind == DecayPipeline.__name__ and CODE.fullmatch(module) is not None


def _text(path: Path) -> str:
    """Return the text of a small file; it is empty if there is none."""
    if not path.is_file() or path.stat().st_size > MOST:
        return ""
    return path.read_bytes().decode(errors="replace")
