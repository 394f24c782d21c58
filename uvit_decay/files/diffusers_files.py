"""Files of weights in the folder of a model of diffusers: one file, a variant such as fp16, or shards with an index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from uvit_decay.files.tensor_files import check_weights, load_any
from uvit_decay.files.validation import as_type, read_json
from uvit_decay.terminal.errors import UserError

NAME = "diffusion_pytorch_model"
# As `save_pretrained` names them: NAME.fp16.safetensors, and NAME.safetensors.index.fp16.json beside the shards.
FILE = re.compile(NAME + r"(\.(?P<variant>[^.-]+))?\.(?P<format>safetensors|bin)")
SHARD_INDEX = re.compile(NAME + r"\.(?P<format>safetensors|bin)\.index(\.(?P<variant>[^.-]+))?\.json")
FORMATS = ("safetensors", "bin")  # the first one that is there is read


class WeightsFile(NamedTuple):
    """The weights of a model: a file, or the index of its shards; `variant` is diffusers' name of a variant."""

    path: Path
    variant: str | None


def find_weights(folder: Path) -> WeightsFile | None:
    """Return the weights of a model in its folder, if possible not a variant; None without a file of weights."""
    found = []
    for path in folder.iterdir():
        match = FILE.fullmatch(path.name) or SHARD_INDEX.fullmatch(path.name)
        if match and path.is_file():
            found.append((match["variant"] or "", FORMATS.index(match["format"]), path))
    if not found:
        return None
    variant, _, path = min(found)
    return WeightsFile(path, variant or None)


def read_shards(index: Path) -> dict[str, Tensor]:
    """Return all weights of the shards in an index, `*.index.json`; they may be memory-mapped."""
    values = read_json(index, dict[str, object])
    shards = as_type(dict[str, str], values.get("weight_map"), f"weight_map of {index}")
    weights: dict[str, Tensor] = {}
    for name in sorted(set(shards.values())):
        if Path(name).name != name:
            raise UserError(f"{index} is damaged: its shard {name} is not a file beside it")
        path = index.with_name(name)
        _, contents = load_any(path)
        state = as_type(dict[str, Tensor], contents, f"weights in {path}")
        check_weights(path, state)
        weights |= state
    missing = sorted(shards.keys() - weights.keys())
    if missing:
        raise UserError(f"the shards of {index} lack {len(missing)} weights, the first is {missing[0]}: download again")
    return weights
