"""DiT as a folder of diffusers, such as facebook/DiT-XL-2-256: its names and copies, its configuration and labels.

The folder has model_index.json, transformer/config.json with its weights, and scheduler/scheduler_config.json.
diffusers' DiTTransformer2DModel holds the tensors of the official network under other names: query, key and value are
separate, and the embeddings of time and label are repeated in each block. Its function differs slightly: its time
embedding has the frequencies 10000^(-i/127) instead of 10000^(-i/128), and one of its two norms has an epsilon of 1e-5.
The tensors were trained with the official network, and are imported as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uvit_decay.checkpoint.official import sit
from uvit_decay.checkpoint.official.common import RecognisedModel, StateDict
from uvit_decay.checkpoint.options import ImportOptions
from uvit_decay.files.diffusers_files import NAME, find_weights
from uvit_decay.files.validation import as_type, read_json
from uvit_decay.files.writing import quote_path
from uvit_decay.nn.embed import sincos_positions
from uvit_decay.terminal.errors import UserError

CONFIG = "config.json"
INDEX = "model_index.json"
SCHEDULER = "scheduler_config.json"
SCHEDULE: dict[str, object] = {  # values in the scheduler's configuration: DDPMLinear, prediction eps
    "num_train_timesteps": 1000,
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "trained_betas": None,
    "prediction_type": "epsilon",
    "rescale_betas_zero_snr": False,
}
NAMES = {  # diffusers' prefix of a name: official prefix
    "pos_embed.proj.": "x_embedder.proj.",
    "proj_out_1.": "final_layer.adaLN_modulation.1.",
    "proj_out_2.": "final_layer.linear.",
}
IN_BLOCK = {
    "norm1.linear.": "adaLN_modulation.1.",
    "attn1.to_out.0.": "attn.proj.",
    "ff.net.0.proj.": "mlp.fc1.",
    "ff.net.2.": "mlp.fc2.",
}
EMBEDDERS = {  # repeated in each block, with equal values
    "norm1.emb.timestep_embedder.linear_1.": "t_embedder.mlp.0.",
    "norm1.emb.timestep_embedder.linear_2.": "t_embedder.mlp.2.",
    "norm1.emb.class_embedder.": "y_embedder.",
}
RANKS = {"weight": 2, "bias": 1}
BLOCKS = "transformer_blocks."
POSITIONS = "pos_embed.pos_embed"
NOTE = "it is the official network: diffusers' own embeds times at slightly other frequencies, and makes other images"


def weights_file(folder: Path) -> Path | None:
    """Return the weights file, or the index of shards, of a pipeline or of its transformer; None for other folders."""
    configured = [home for home in (folder / "transformer", folder) if (home / CONFIG).is_file()]
    for home in configured:
        found = find_weights(home)
        if found is not None:
            return found.path
    if configured:
        raise UserError(f"{configured[0]} holds no {NAME}.safetensors, .bin or index of shards: download all of it")
    return None


def recognise(loaded: StateDict, options: ImportOptions) -> RecognisedModel:
    """Return the network of a file of diffusers' DiT, with the configurations beside it, if they are there."""
    config = _read_configuration(loaded.where.with_name(CONFIG))
    pipeline = loaded.where.parent
    if pipeline.name == "transformer":
        pipeline = pipeline.parent
    schedule = _read_configuration(pipeline / "scheduler" / SCHEDULER)
    for name, value in SCHEDULE.items():
        if schedule.get(name, value) != value:
            raise UserError(f"{pipeline} has a scheduler with {name} {schedule[name]!r}: a DiT has {value}")
    index = _read_configuration(pipeline / INDEX)
    if options.path not in (None, "ddpm-linear"):
        raise UserError(f"{loaded.where} is a DiT of diffusers, whose path is ddpm-linear: leave out `path`")
    if options.heads is None and "num_attention_heads" in config:
        options = replace(options, heads=as_type(int, config["num_attention_heads"], "num_attention_heads"))
    model = sit.recognise(_official(loaded, config), replace(options, path="ddpm-linear"))
    notes = [NOTE]
    autoencoder = pipeline / "vae"
    if autoencoder.is_dir():
        notes.append(f"its autoencoder stays where it is: `vae` {quote_path(autoencoder)}")
    return replace(model, class_names=_class_names(index, model.net.num_classes), notes=tuple(notes))


def _read_configuration(path: Path) -> dict[str, Any]:
    """Return the values of a configuration file; an empty dict if there is no such file."""
    return read_json(path, dict[str, object]) if path.is_file() else {}


def _class_names(index: Mapping[str, Any], num_classes: int) -> tuple[str, ...] | None:
    """Return the labels of model_index.json, in order; None if it has none."""
    if "id2label" not in index:
        return None
    labels = as_type(dict[str, str], index["id2label"], f"id2label of {INDEX}")
    if set(labels) != {str(label) for label in range(num_classes)}:
        raise UserError(f"id2label of {INDEX} has {len(labels)} labels, not 0 to {num_classes - 1} of the network")
    return tuple(labels[str(label)] for label in range(num_classes))


def _official(loaded: StateDict, config: Mapping[str, Any]) -> StateDict:
    """Return the state_dict with the names of the official network; unknown names stay as they are."""
    state: dict[str, Tensor] = {}
    for name, value in loaded.state.items():
        if name.startswith(BLOCKS):
            number, _, rest = name.removeprefix(BLOCKS).partition(".")
            state |= _convert_entry(loaded, number, rest, value)
        else:
            state[_rename(name, NAMES)] = value
    if POSITIONS in state:
        state["pos_embed"] = state.pop(POSITIONS)
    else:
        state["pos_embed"] = _positions(loaded, config)
    return replace(loaded, state=state)


def _rename(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with its prefix, diffusers' name, replaced by the official one."""
    for theirs, official in prefixes.items():
        if name.startswith(theirs):
            return official + name.removeprefix(theirs)
    return name


def _convert_entry(loaded: StateDict, number: str, rest: str, value: Tensor) -> dict[str, Tensor]:
    """Return the official entry for one entry of a block; none for key and value, which are joined with the query.

    Args:
        loaded: the whole file.
        number: number of the block.
        rest: name of the entry within the block.
        value: its tensor.
    """
    if rest.startswith(tuple(EMBEDDERS)):
        first = loaded.state.get(f"{BLOCKS}0.{rest}")
        if first is None or first.shape != value.shape or not torch.equal(first, value):
            raise loaded.error(f"its block {number} has another {rest} than its first: a DiT has one for all")
        return {_rename(rest, EMBEDDERS): first}
    kind, _, end = rest.rpartition(".")
    if end in RANKS and kind in ("attn1.to_k", "attn1.to_v"):
        return {}
    if end in RANKS and kind == "attn1.to_q":
        parts = []
        for letter in "qkv":
            name = f"{BLOCKS}{number}.attn1.to_{letter}.{end}"
            if loaded.shape(name, RANKS[end]) != value.shape:
                raise loaded.error(f"its {name} has another shape than the query")
            parts.append(loaded.state[name])
        return {f"blocks.{number}.attn.qkv.{end}": torch.cat(parts)}
    return {f"blocks.{number}.{_rename(rest, IN_BLOCK)}": value}


def _positions(loaded: StateDict, config: Mapping[str, Any]) -> Tensor:
    """Return the fixed positions for the configured size; newer files leave them out."""
    if "sample_size" not in config:
        raise UserError(f"{loaded.where} holds no positions, and no {CONFIG} beside it has a sample_size")
    dim, _, patch, _ = loaded.shape("pos_embed.proj.weight", 4)
    size = as_type(int, config["sample_size"], "sample_size")
    if size % patch:
        raise UserError(f"{loaded.where} has patches of {patch}, its {CONFIG} has sample_size {size}")
    return sincos_positions(size // patch, dim)[None]
