"""Third-party files: reading them, and recognising them by the names of their entries for error messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from uvit_decay.runtime.diffusers_files import read_shards
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.tensor_files import load_any
from uvit_decay.runtime.wrapped_names import without_marks

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
MOST_PARTS = 10  # inspected entries of a training checkpoint
MOST_WRAPPERS = 4  # around a network, each with a part of its own in the names


class ThirdParty(UserError):
    """A file is intact, but was not written by this project."""


def looks_like(contents: object) -> str:
    """Name the kind of a third-party file, given its contents: one of `KINDS` for a state_dict that can be imported."""
    if not isinstance(contents, Mapping):
        return f"a single {type(contents).__name__}"
    if kind := _find_kind(contents):
        return kind
    names = [name for name in contents if isinstance(name, str)]
    for name in names[:MOST_PARTS]:
        part = contents[name]
        if isinstance(part, Mapping) and (kind := _find_kind(part)):
            return f"a training checkpoint, whose entry {name!r} is {kind}"
    found = ", ".join(names[:4]) or "nothing"
    return f"a file of another program, it holds {found}"


def _find_kind(state: Mapping[object, object]) -> str | None:
    """Return the kind of a state_dict, which may be wrapped; None if it is not one of KINDS."""
    found = network_prefixes(state)
    if not found:
        return None
    names = [without_marks(name).removeprefix(found[0]) for name in state if isinstance(name, str)]
    for kind, prefixes in KINDS.items():
        if any(name.startswith(prefixes) for name in names):
            return kind
    return None


def network_prefixes(names: Iterable[object]) -> list[str]:
    """Return what wrappers put before the names of each network of `KINDS`, such as "module." or "model.ema.".

    Args:
        names: names of the entries of a state_dict; the marks of torch.compile and FSDP are ignored.

    Returns:
        sorted prefixes; one empty text for a network without a wrapper, an empty list without a network.
    """
    known = tuple(prefix for prefixes in KINDS.values() for prefix in prefixes)
    found: set[tuple[str, ...]] = set()
    for name in names:
        if not isinstance(name, str):
            continue
        parts = without_marks(name).split(".")
        for count in range(min(len(parts), MOST_WRAPPERS + 1)):
            if ".".join(parts[count:]).startswith(known):
                found.add(tuple(parts[:count]))
                break
    # A prefix below another one is a part of that network, such as the mask token of a skip layer.
    outer = [parts for parts in found if not any(parts[:count] in found for count in range(len(parts)))]
    return sorted("".join(f"{part}." for part in parts) for parts in outer)


def read_third_party(path: Path) -> Any:
    """Load a third-party checkpoint, or the shards of an index; raise a UserError for a checkpoint of this project."""
    if path.suffix == ".json":
        return read_shards(path)
    metadata, contents = load_any(path)
    if KEY in metadata or (isinstance(contents, dict) and KEY in contents):
        raise UserError(f"{path} is a checkpoint of this project: use it as it is, or export it")
    return contents
