"""Factors of the long skips (`skip_scale`): constants, ScaleLong's, and the factors that the decay itself gives them.

A long skip leads from a state s of the encoder to a merge in the decoder. With a factor c of the skip and a factor d of
the bias, the merge computes

    W [x, c s] + d b             U-ViT, and SiT with skip `concat`
    x + c W s + d b              SiT with skip `add`
    y + W2 SiLU(W1 [c s, y])     MAE's SkipLayers; mask tokens enter after the factor

The kinds of `skip_scale` follow. j = 0, 1, .. numbers the sources of skips in execution order (0 is the first block
that a skip can read). P is the product of the alphas of the schedule `linear` up to a point (docs/equivalence.md):

    a number c      c for all skips, d = 1. 1 is the plain network, 2^-.5 the "1/sqrt(2)-CS" of ScaleLong
    kappa:k         c = k^j, d = 1 (ScaleLong's CS, Huang et al., NeurIPS 2023); `kappa` is kappa:0.5, its default
    learned         c = sigmoid(W2 relu(W1 m)), one factor per token, m the mean of s over channels; d = 1. One gate for
                    all skips (ScaleLong's LS)
    learned-each    the same with a gate for each skip (LS, not shared)
    stream          c = P_s / P, d = 1 / P with P_s at the source and P at the merge, for this network's alpha_min. The
                    schedule `gain` then gives the same function as the schedule `linear`. MAE: c = P_s
    stream:a        the same with P of alpha_min a, for a network whose alphas are all 1

n = tokens of a skip, d = width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from uvit_decay import decay
from uvit_decay.nn.recorded import check_recorded
from uvit_decay.terminal.errors import UserError, check_choice, check_numbers

SkipScale = float | str  # see above
SKIP_SCALES = ("kappa", "learned", "learned-each", "stream")
KAPPA = 0.5  # default of ScaleLong's code
REDUCTION = 16  # tokens over the hidden width of a gate, as in ScaleLong's code


class MergeWeights(NamedTuple):
    """Factors of a merge: `skip` is c, a number, a scalar tensor or one factor per token (b, n, 1); `bias` is d."""

    skip: float | Tensor
    bias: float | Tensor


@dataclass(frozen=True)
class SkipPlan:
    """Positions of the long skips of a network, in the order in which the merges read them.

    Args:
        sources: number of decayed blocks before each skip's source.
        merges: number of decayed blocks before each merge; empty if the decoder is not part of the decayed stream.
        tokens: number n of tokens that a gate reads.
        every: number of blocks between two sources.
        boundary: whether W of a merge also maps the stream (`concat`); see `decay.mixing_matrix`.
    """

    sources: tuple[int, ...]
    merges: tuple[int, ...]
    tokens: int
    every: int = 1
    boundary: bool = True


def plan_mirrored_skips(blocks: int, skips: int, tokens: int, boundary: bool = True) -> SkipPlan:
    """Return the plan in which the last `skips` of all blocks read the states after the first, last in, first out."""
    sources = tuple(range(skips, 0, -1))
    merges = tuple(range(blocks - skips, blocks))
    return SkipPlan(sources, merges, tokens, boundary=boundary)


class SkipGate(nn.Module):
    """Gate of ScaleLong's LS: one factor in (0, 1) per token, computed from the means of all tokens over channels."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(tokens, tokens // REDUCTION)
        self.fc2 = nn.Linear(tokens // REDUCTION, tokens)

    def forward(self, state: Float[Tensor, "b n d"]) -> Float[Tensor, "b n 1"]:
        hidden = self.fc1(state.mean(dim=-1)).relu()
        return self.fc2(hidden).sigmoid()[..., None]


class LongSkips(nn.Module):
    """Factors of all merges: called with the number of a skip and its state, it returns `MergeWeights`.

    Fixed factors are in the buffer `scales` (2, skips), rows c and d, which loading compares. Learned factors are
    computed by `gates`.

    Args:
        factors: the rows c and d of fixed factors; two empty rows with gates.
        gates: number of gates, 0 for fixed factors.
        tokens: number n of tokens that a gate reads.
    """

    def __init__(self, factors: Sequence[Sequence[float]], gates: int, tokens: int) -> None:
        super().__init__()
        of_skips, of_biases = factors
        self.fixed = [MergeWeights(c, d) for c, d in zip(of_skips, of_biases, strict=True)]
        self.gates = nn.ModuleList([SkipGate(tokens) for _ in range(gates)])
        if not gates:
            self.register_buffer("scales", torch.tensor(factors, dtype=torch.float32))
            self.register_load_state_dict_pre_hook(_check_scales)

    def gate(self, j: int) -> SkipGate | None:
        """Return the gate of skip j, or None if its factors are fixed."""
        if not self.gates:
            return None
        return self.gates[j % len(self.gates)]

    def forward(self, j: int, state: Float[Tensor, "b n d"], as_tensors: bool = False) -> MergeWeights:
        """Return the factors of skip j; fixed factors are tensors with `as_tensors`, for compiled blocks."""
        gate = self.gate(j)
        if gate is not None:
            return MergeWeights(gate(state), 1.0)
        if as_tensors:
            return MergeWeights(*self.scales[:, j])
        return self.fixed[j]


def build_long_skips(config: Mapping[str, Any], shortcuts: decay.Shortcuts, plan: SkipPlan) -> LongSkips | None:
    """Return the factors of the long skips of a network, or None for plain skips, which cost nothing."""
    scale = config["skip_scale"]
    count = len(plan.sources)
    if not isinstance(scale, str):
        check_numbers("(0, 1000]", skip_scale=scale)
        if scale == 1:
            return None
    if count == 0:
        raise UserError(f"skip_scale {scale}: this network has no long skips; set `skip_scale` to 1")
    ones = [1.0] * count
    if not isinstance(scale, str):
        return LongSkips([[float(scale)] * count, ones], 0, plan.tokens)
    kind, colon, text = scale.partition(":")  # "kappa:0.7"; without a colon the kind has its default
    check_choice(SKIP_SCALES, skip_scale=kind)
    if kind == "kappa":
        kappa = _parse_value(scale, text) if colon else KAPPA
        powers = [kappa ** (source // plan.every - 1) for source in plan.sources]
        return LongSkips([powers, ones], 0, plan.tokens)
    if kind == "stream":
        alpha_min = _alpha_min_of_stream(config, shortcuts, text if colon else None)
        factors = _stream_factors(config, alpha_min, len(shortcuts.alphas) // 2, plan)
        return LongSkips(factors, 0, plan.tokens)
    if colon:
        raise UserError(f"skip_scale {scale}: {kind} takes no value; set `skip_scale` to {kind}")
    if plan.tokens < REDUCTION:
        raise UserError(
            f"skip_scale {scale}: its gates need at least {REDUCTION} tokens, this network has {plan.tokens}; "
            "use smaller patches, or kappa"
        )
    gates = count if kind == "learned-each" else 1
    return LongSkips([[], []], gates, plan.tokens)


def _parse_value(scale: str, text: str) -> float:
    """Return the number after the colon of `scale`, which must lie in (0, 1]."""
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"skip_scale {scale}: {text!r} is not a number; give one in (0, 1], as in kappa:0.7") from None
    check_numbers("(0, 1]", skip_scale=value)
    return value


def _alpha_min_of_stream(config: Mapping[str, Any], shortcuts: decay.Shortcuts, text: str | None) -> float:
    """Return the alpha_min of P; raise a UserError if the network's alphas already give the skips such a factor."""
    schedule = config["schedule"]
    scale = config["skip_scale"]
    if text is None:
        if schedule != "gain":
            raise UserError(
                f"skip_scale {scale} needs the schedule gain, this network has {schedule!r}; "
                "set `schedule` to gain, or give an alpha_min, such as stream:0.8"
            )
        return config["alpha_min"]
    shortcuts.check_numbers(f"skip_scale {scale}")
    if shortcuts.learned == "alphas" or set(shortcuts.alphas) != {1.0}:
        raise UserError(
            f"skip_scale {scale}: the schedule {schedule!r} with alpha_min {config['alpha_min']} has alphas other than "
            "1, which scale the skips already; set `schedule` to gain, or `alpha_min` to 1"
        )
    return _parse_value(scale, text)


def _stream_factors(config: Mapping[str, Any], alpha_min: float, blocks: int, plan: SkipPlan) -> list[list[float]]:
    """Return the rows c and d that the decay of this alpha_min gives the skips (docs/equivalence.md)."""
    linear_decay = decay.shortcuts(
        blocks, alpha_min, "linear", config["granularity"], config["index"], config["branches"]
    )
    products = [1.0, *accumulate(linear_decay.alphas, mul)]  # P before each branch
    of_skips = []
    of_biases = []
    for i, source in enumerate(plan.sources):
        at_merge = products[2 * plan.merges[i]] if plan.merges else 1.0
        of_skips.append(products[2 * source] / at_merge)
        of_biases.append(1.0 / at_merge)
    return [of_skips, of_biases]


def scale_skip(state: Tensor, weights: MergeWeights | None) -> Tensor:
    """Return c s, or s itself without weights."""
    if weights is None:
        return state
    return state * weights.skip


def merge_linear(layer: nn.Linear, x: Tensor, weights: MergeWeights | None) -> Tensor:
    """Return W x + d b, or layer(x) without weights."""
    if weights is None:
        return layer(x)
    return linear(x, layer.weight, layer.bias * weights.bias)


def _check_scales(skips: LongSkips, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Raise a UserError for weights that were trained with other factors (hook before a state_dict is loaded)."""
    factors = list(zip(*skips.fixed, strict=True))
    check_recorded("long skips of scale", state.get(f"{prefix}scales"), factors, "`skip_scale` and `alpha_min`")
