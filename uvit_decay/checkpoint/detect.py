"""Third-party files: reading them, and recognising them by the names of their entries for error messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uvit_decay.files.diffusers_files import read_shards
from uvit_decay.files.tensor_files import load_any
from uvit_decay.files.wrapped_names import shorten_names
from uvit_decay.terminal.errors import UserError

KEY = "uvit_decay"  # key of the card in a .ckpt, and in the metadata of a .safetensors
IMPORTED = "which uvit-decay import makes into one of ours"
UVIT = f"an official U-ViT, {IMPORTED}"
SIT = f"a SiT (or a DiT, whose names are the same), {IMPORTED}"
DIFFUSERS_DIT = f"a DiT of diffusers, {IMPORTED}"
MAE_FILE = f"an MAE, {IMPORTED}"
VIT_FILE = f"a plain vision transformer, as the encoder of an MAE, {IMPORTED}"
KINDS: dict[str, tuple[str, ...]] = {  # prefixes of names; the first match counts
    DIFFUSERS_DIT: ("transformer_blocks.0.norm1.emb.",),
    SIT: ("enc_blocks.", "x_embedder.", "t_embedder."),
    MAE_FILE: ("mask_token", "decoder_embed."),
    UVIT: ("in_blocks.", "out_blocks."),
    VIT_FILE: ("cls_token",),
}


class ThirdParty(UserError):
    """A file is intact, but was not written by this project."""


def looks_like(contents: object) -> str:
    """Name the kind of a third-party file, given its contents: one of `KINDS` for a state_dict that can be imported."""
    if not isinstance(contents, Mapping):
        return f"a single {type(contents).__name__}"
    if kind := _find_kind(contents):
        return kind
    names = [name for name in contents if isinstance(name, str)]
    for name in names:
        part = contents[name]
        if isinstance(part, Mapping) and (kind := _find_kind(part)):
            return f"a training checkpoint, whose entry {name!r} is {kind}"
    found = ", ".join(names[:4]) or "nothing"
    return f"a file of another program, it holds {found}"


def _find_kind(state: Mapping[object, object]) -> str | None:
    """Return the kind of a state_dict, which may be wrapped; None if it is not one of KINDS."""
    names = shorten_names(name for name in state if isinstance(name, str)).values()
    for kind, prefixes in KINDS.items():
        if any(name.startswith(prefixes) for name in names):
            return kind
    return None


def read_third_party(path: Path) -> Any:
    """Load a third-party checkpoint, or the shards of an index; raise a UserError for a checkpoint of this project."""
    if path.suffix == ".json":
        return read_shards(path)
    metadata, contents = load_any(path)
    if KEY in metadata or (isinstance(contents, dict) and KEY in contents):
        raise UserError(f"{path} is a checkpoint of this project: use it as it is, or export it")
    return contents
