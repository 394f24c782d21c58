"""Recognition of third-party files by the names of their entries, for imports and error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from torch import Tensor

from uvit_decay.runtime.errors import UserError

PREFIX = "module."  # DataParallel puts it before every name
IMPORTED = "which uvit-decay import makes into one of ours"
UVIT = f"an official U-ViT, {IMPORTED}"
SIT = f"a SiT (or a DiT, whose names are the same), {IMPORTED}"
DIFFUSERS_DIT = f"a DiT of diffusers, {IMPORTED}"
MAE_FILE = f"an MAE, {IMPORTED}"
VIT_FILE = f"a plain vision transformer, as the encoder of an MAE, {IMPORTED}"
OPTIMIZER = "the state of an optimizer or of its schedule: the weights are in nnet_ema.pth and nnet.pth"
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (  # (kind, prefixes of names); the first match counts
    ("a whole Stable Diffusion checkpoint, not a U-ViT", ("model.diffusion_model.", "first_stage_model.")),
    ("a text-to-image U-ViT, which is not supported", ("context_embed.",)),
    (DIFFUSERS_DIT, ("transformer_blocks.0.norm1.emb.",)),
    (SIT, ("enc_blocks.", "x_embedder.", "t_embedder.")),
    (MAE_FILE, ("mask_token", "decoder_embed.")),
    ("a convolutional UNet, as of diffusers", ("down_blocks.", "input_blocks.")),
    (UVIT, ("in_blocks.", "out_blocks.")),
    ("an autoencoder (VAE), which --vae names by its hub id or folder", ("encoder.", "decoder.", "quant_conv.")),
    (VIT_FILE, ("cls_token",)),
    ("an Inception network", ("Conv2d_1a_3x3.",)),
)
FOREIGN = "a file of another program"
MOST_PARTS = 10  # inspected entries of a dict: a pickle can nest one dict a thousand times in each of a thousand


class ThirdParty(UserError):
    """A file is intact, but was not written by this project."""


def looks_like(contents: object, depth: int = 3) -> str:
    """Name the kind of a third-party file, given its contents.

    It is one of `UVIT`, `SIT`, `DIFFUSERS_DIT`, `MAE_FILE` and `VIT_FILE` for a bare state_dict that can be imported.
    Nested dicts are inspected down to `depth` levels.
    """
    if not isinstance(contents, Mapping):
        return f"a single {type(contents).__name__}"
    if not contents:
        return "an empty dict, without any weights"
    if {"state", "param_groups"} <= contents.keys() or "last_epoch" in contents:
        return OPTIMIZER
    keys = [name for name in contents if isinstance(name, str)]
    inner = islice((name for name in keys if _has_weights(contents[name])), MOST_PARTS if depth else 0)
    if parts := {name: looks_like(contents[name], depth - 1) for name in inner}:
        return _training_checkpoint(parts, keys)
    names = [name.removeprefix(PREFIX) for name in keys]
    for kind, marks in KINDS:
        if any(name.startswith(marks) for name in names):
            return kind
    return f"{FOREIGN}, it holds {', '.join(names[:4])} ..."


def _has_weights(value: object) -> bool:
    return isinstance(value, Mapping) and any(isinstance(inner, Tensor | Mapping) for inner in value.values())


def _training_checkpoint(parts: dict[str, str], entries: Sequence[str]) -> str:
    """Describe a dict of state_dicts: the U-ViT entry that the user should extract, or else one of a known kind."""
    text = f"a training checkpoint with the entries {', '.join(entries[:6])}"
    known = {name: kind for name, kind in parts.items() if kind != OPTIMIZER and not kind.startswith(FOREIGN)}
    if not known:
        return text
    name = min(known, key=lambda name: (known[name] != UVIT, "ema" not in name))
    if known[name] != UVIT:
        return f"{text}, {name!r} is {known[name]}"
    return f"{text}: save its entry {name!r} alone, torch.save(torch.load(FILE)[{name!r}], 'uvit.pth')"
