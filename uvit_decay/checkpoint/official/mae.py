"""Official MAE files (He et al., CVPR 2022; github.com/facebookresearch/mae) and files of the decay's authors.

A file is a dict of `model` and, from training, of `optimizer`, `epoch`, `scaler` and `args`; timm's vision transformers
are bare state_dicts of the same names. With a decoder it is an `MAE`: the released `full` and `visualize` files, which
differ in their targets alone, and files of the authors' pre-training, which record alpha_min in `args`. Without a
decoder it is a `ViT`: an encoder, a fine-tuned network (`fc_norm`) or a linear probe (`head.0`, a batch norm). Names
are ours, except for the buffer `alphas`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from uvit_decay.checkpoint.official.common import RecognisedModel, StateDict, build_on_meta
from uvit_decay.checkpoint.options import ImportOptions
from uvit_decay.files.validation import as_type
from uvit_decay.nn.mae import MAE
from uvit_decay.nn.sizes import VIT_SIZES
from uvit_decay.nn.vit import ViT
from uvit_decay.terminal.errors import UserError

ENTRY = "model"  # key of the state_dict in a file
DECAY = "min_decay"  # name of alpha_min among the authors' arguments
NORMALISED = "norm_pix_loss"  # name of norm_pix among the arguments
UNNORMALISED = "mae_visualize"  # prefix of the names of released files that predict plain pixels
DECODER_HEADS = {512: 16}  # heads of the decoder by its width; only this width is published
LICENCE = "MAE's released weights and what is made from them are under CC-BY-NC 4.0: not for commercial use"


def recognise(loaded: StateDict, options: ImportOptions) -> RecognisedModel:
    """Return the MAE of a file with a decoder; raise a UserError if file or options do not fit."""
    norm_pix = options.norm_pix
    if norm_pix is None and loaded.arguments.get(NORMALISED) is not None:
        norm_pix = as_type(bool, loaded.arguments[NORMALISED], f"{loaded.where}: {NORMALISED}")
    if norm_pix is None:
        norm_pix = not loaded.where.name.startswith(UNNORMALISED)
    config = _encoder(loaded, options) | _decoder(loaded, options) | {"norm_pix": norm_pix}
    model = _build(MAE, config, loaded, options)
    loaded, unread = remove_unread(loaded, model.net)
    notes = [LICENCE]
    if unread:
        notes.insert(0, f"left out {unread}, which no block of its decoder reads")
    return replace(model, state=loaded.weights_for(model.net), notes=tuple(notes))


def recognise_encoder(loaded: StateDict, options: ImportOptions) -> RecognisedModel:
    """Return the ViT of a file without a decoder; raise a UserError if file or options do not fit."""
    config = _encoder(loaded, options) | _head(loaded, options.num_classes)
    model = _build(ViT, config, loaded, options)
    return replace(model, state=loaded.weights_for(model.net))


def _build(
    kind: type[MAE] | type[ViT], config: dict[str, Any], loaded: StateDict, options: ImportOptions
) -> RecognisedModel:
    """Return the network with these arguments, its heads and alpha_min; without weights."""
    sizes = {f"{kind.__name__.lower()}-{name}": size for name, size in VIT_SIZES.items()}
    size, heads = loaded.size(config, options.heads, sizes)
    decayed = not config["norm"] or config.get("wiring") == "decayed"  # the authors' networks have no last norm
    given = loaded.recorded_alpha_min(DECAY, options.alpha_min)
    alpha_min = loaded.alpha_min(given, decayed, "the paper has 0.6, its code 0.7")
    net = build_on_meta(kind, **config, heads=heads, alpha_min=alpha_min)
    return RecognisedModel(net, {}, size, decayed=decayed, weights="raw", notes=(LICENCE,))


def _encoder(loaded: StateDict, options: ImportOptions) -> dict[str, Any]:
    """Return the arguments of an encoder that names and shapes determine."""
    image = loaded.image_layout("patch_embed.proj", num_prefix_tokens=1)
    usual_pixels = "imagenet" if image["channels"] == 3 else "unit"
    return image | {
        "depth": loaded.blocks("blocks"),
        "mlp_ratio": loaded.shape("blocks.0.mlp.fc1.weight", 2)[0] / image["dim"],
        "norm": "norm.weight" in loaded.state,
        "pixels": options.pixels or usual_pixels,
    }


def _decoder(loaded: StateDict, options: ImportOptions) -> dict[str, Any]:
    """Return the arguments of the decoder, whose heads are published for one width only."""
    dim = loaded.shape("decoder_embed.weight", 2)[0]
    heads = options.decoder_heads
    if heads is None:
        heads = DECODER_HEADS.get(dim)
    if heads is None:
        raise UserError(
            f"{loaded.where} has a decoder of width {dim}, which is not published: its weights do not determine the "
            "attention heads, give them with `decoder_heads`"
        )
    skips = any(name.startswith("skip.") for name in loaded.state)
    wiring = "decayed"
    if "norm.weight" in loaded.state and not skips:
        wiring = "official"
    return {
        "decoder_dim": dim,
        "decoder_depth": loaded.blocks("decoder_blocks"),
        "decoder_heads": heads,
        "wiring": wiring,
        "skips": skips,
        "decoder_input": "latent" if "mask_token" in loaded.state else "positions",
    }


def _head(loaded: StateDict, num_classes: int | None) -> dict[str, Any]:
    """Return the arguments of the classifier; it has 0 classes for an encoder alone."""
    probe = "head.1.weight" in loaded.state  # of a linear probe, after a batch norm
    name = "head.1.weight" if probe else "head.weight"
    rows = 0
    if name in loaded.state:
        rows, _ = loaded.shape(name, 2)
    if num_classes not in (None, rows):
        has = f"a head of {rows} classes" if rows else "no classifier"
        raise UserError(f"{loaded.where} has {has}, not one of {num_classes}: leave out `num_classes`")
    classifier: dict[str, Any] = {"num_classes": rows, "batch_norm": probe}
    if "fc_norm.weight" in loaded.state:
        return classifier | {"pool": "mean", "norm": True}
    return classifier | {"pool": "cls"}


def remove_unread(loaded: StateDict, net: MAE) -> tuple[StateDict, str]:
    """Remove the SkipLayers that no decoder block reads; return the rest and the names of the removed layers.

    The authors' code builds a SkipLayer for every second block of the encoder, ours one for every block of the decoder
    that reads one.
    """
    unread = []
    kept = dict(loaded.state)
    for layer in _unread_layers(net):
        if f"{layer}.mask_token" not in loaded.state:
            continue
        unread.append(layer)
        for name in loaded.state:
            if name.startswith(f"{layer}."):
                del kept[name]
    return replace(loaded, state=kept), ", ".join(unread)


def unread_skips(net: MAE, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zero weights for the SkipLayers that the authors' code builds and no block reads; its loader is strict."""
    if not len(net.skip):
        return {}
    zeros = {}
    for layer in _unread_layers(net):
        for name, value in state.items():
            if name.startswith("skip.0."):
                zeros[f"{layer}.{name.removeprefix('skip.0.')}"] = torch.zeros_like(value)
    return zeros


def _unread_layers(net: MAE) -> list[str]:
    """Return the names of the SkipLayers that the authors' code builds, but `net` does not have."""
    return [f"skip.{j}" for j in range(len(net.skip), net.config["depth"] // 2)]
