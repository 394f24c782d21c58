r"""SiTs of REPA (Yu et al., ICLR 2025; github.com/sihyun-yu/REPA), as networks of the published SiT.

REPA trains SiT's network with other conventions. Its time t is 0 at the data and 1 at the noise, SiT's is s = 1 - t,
and its output is dx/dt, SiT's is dx/ds = -dx/dt. `projectors.*`, which map hidden states to the features of an encoder,
serve its loss only. The conversion gives SiT's function of s exactly, up to rounding:

- The head is negated.
- The first linear layer of the time embedding reads cos(f t) and sin(f t) for 128 frequencies f. With t = 1 - s,
      cos(f t) = cos(f) cos(f s) + sin(f) sin(f s)
      sin(f t) = sin(f) cos(f s) - cos(f) sin(f s),
  so that a fixed linear map of its weights W = [C, S] makes them read cos(f s) and sin(f s).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from uvit_decay.checkpoint.official.common import StateDict
from uvit_decay.checkpoint.options import ImportOptions

PROJECTORS = "projectors."
VELOCITY = "v"  # REPA's name of its only prediction
WAVES = "t_embedder.mlp.0.weight"
HEAD = ("final_layer.linear.weight", "final_layer.linear.bias")
LATER = "decoder_blocks."  # names of the blocks above the projectors in REPA's first files (its option --legacy)
NOTE = "read as REPA's SiT: its time and its velocity run the other way and were converted to SiT's"


def convert_file(loaded: StateDict, options: ImportOptions) -> tuple[StateDict, tuple[str, ...]]:
    """Return a state_dict without REPA's projectors, as the published SiT, and remarks; other files are unchanged.

    The recorded prediction tells whether REPA's code wrote the file. Without it, projectors tell it, unless the caller
    gives the path of a DiT.
    """
    notes = []
    kept = {name: value for name, value in loaded.state.items() if not name.startswith(PROJECTORS)}
    removed = len(loaded.state) - len(kept)
    if removed:
        notes.append(f"left out {removed} weights {PROJECTORS}*, which only REPA's loss uses")
    prediction = loaded.arguments.get("prediction")
    is_repa = removed > 0 and options.path != "ddpm-linear"
    if prediction is not None:
        is_repa = prediction == VELOCITY
    if is_repa:
        kept = convert(kept)
        notes.append(NOTE)
    return replace(loaded, state=kept), tuple(notes)


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict of REPA, without projectors, as the published SiT; see the module for the formulas.

    Entries of unexpected shapes stay as they are; the recognition of the network refuses them.
    """
    converted = _join_blocks(state)
    for name in HEAD:
        if name in converted:
            converted[name] = -converted[name]
    waves = converted.get(WAVES)
    if isinstance(waves, Tensor) and waves.ndim == 2 and waves.shape[1] % 2 == 0:
        converted[WAVES] = _reverse_time(waves)
    return converted


def _join_blocks(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries with the blocks `decoder_blocks.*` of first files numbered after `blocks.*`."""
    first = {name.split(".")[1] for name in state if name.startswith("blocks.")}
    joined = {}
    for name, value in state.items():
        number, _, rest = name.removeprefix(LATER).partition(".")
        if name.startswith(LATER) and number.isdecimal():
            name = f"blocks.{len(first) + int(number)}.{rest}"
        joined[name] = value
    return joined


def _reverse_time(weight: Tensor) -> Tensor:
    """Return the weights (d, 2k), float32, that give the same outputs from the waves of 1 - t."""
    half = weight.shape[1] // 2
    frequencies = torch.exp(-math.log(1e4) * torch.arange(half, dtype=torch.float64) / half)
    cosines = frequencies.cos()
    sines = frequencies.sin()
    of_cos, of_sin = weight.double().chunk(2, dim=1)
    return torch.cat([of_cos * cosines + of_sin * sines, of_cos * sines - of_sin * cosines], dim=1).float()
