"""Scales of the long skips (`skip_scale`): constants, ScaleLong's, and the factors that the decay itself gives them.

A long skip takes a state s of the encoder to a merge in the decoder, which computes, with a factor c of the skip and a
factor d of the bias,

    W [x, c s] + d b             U-ViT, and SiT with skip `concat`
    x + c W s + d b              SiT with skip `add`
    y + W2 SiLU(W1 [c s, y])     MAE's SkipLayers; mask tokens enter after the factor

The kinds of `skip_scale`, where j = 0, 1, .. numbers the sources of skips in execution order (0 is the first block that
a skip can read), and P is the product of the alphas of the schedule `linear` up to a point (docs/how_it_works.md):

    a number c      c for all skips, d = 1. 1 is the plain network, 2^-.5 the "1/sqrt(2)-CS" of ScaleLong
    kappa:k         c = k^j, d = 1 (ScaleLong's CS, Huang et al., NeurIPS 2023); `kappa` is kappa:0.5, its default
    learned         c = sigmoid(W2 relu(W1 m)), one factor a token, m the mean of s over channels; d = 1. One gate for
                    all skips (ScaleLong's LS)
    learned-each    the same with a gate for each skip (LS, not shared)
    stream          c = P_s / P, d = 1 / P with P_s at the source and P at the merge, of this network's alpha_min. With
                    the schedule `gain` this is the function of the schedule `linear`. MAE: c = P_s
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
from uvit_decay.runtime.errors import UserError, check_choice, check_numbers

SkipScale = float | str  # see above
SKIP_SCALES = ("kappa", "learned", "learned-each", "stream")
KAPPA = 0.5  # default of ScaleLong's code
REDUCTION = 16  # tokens over the hidden width of a gate, as in ScaleLong's code


class MergeWeights(NamedTuple):
    """The factors of a merge: `skip` c, a number, a scalar tensor or one factor a token (b, n, 1), and `bias` d."""

    skip: float | Tensor
    bias: float | Tensor


@dataclass(frozen=True)
class SkipPlan:
    """The long skips of a network, in the order in which the merges read them.

    Args:
        sources: number of decayed blocks up to the state that each skip takes.
        merges: number of decayed blocks before each merge; empty if the decoder is not a part of the decayed stream.
        tokens: number n of tokens that a gate sees.
        every: blocks between two sources.
        boundary: whether W of a merge reads the stream, too (`concat`); see `decay.mixing_matrix`.
    """

    sources: tuple[int, ...]
    merges: tuple[int, ...]
    tokens: int
    every: int = 1
    boundary: bool = True

    @classmethod
    def mirrored(cls, blocks: int, skips: int, tokens: int, boundary: bool = True) -> SkipPlan:
        """Return the plan of `skips` last blocks that read the states after the first ones, last in, first out."""
        sources = tuple(range(skips, 0, -1))
        return cls(sources, tuple(range(blocks - skips, blocks)), tokens, boundary=boundary)


class SkipGate(nn.Module):
    """ScaleLong's LS: one factor in (0, 1) for each token, from the means of all tokens over their channels."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(tokens, tokens // REDUCTION)
        self.fc2 = nn.Linear(tokens // REDUCTION, tokens)

    def forward(self, state: Float[Tensor, "b n d"]) -> Float[Tensor, "b n 1"]:
        hidden = self.fc1(state.mean(dim=-1)).relu()
        return self.fc2(hidden).sigmoid()[..., None]


class LongSkips(nn.Module):
    """Factors of all merges: called with the number of a skip and its state, it returns `MergeWeights`.

    Fixed factors are the buffer `scales` (2, skips), rows c and d, which loading compares; learned ones are `gates`.
    """

    def __init__(self, factors: Sequence[Sequence[float]], gates: int, tokens: int) -> None:
        super().__init__()
        self.fixed = [MergeWeights(*pair) for pair in zip(*factors, strict=True)]
        self.gates = nn.ModuleList([SkipGate(tokens) for _ in range(gates)])
        if not gates:
            self.register_buffer("scales", torch.tensor(factors))
            self.register_load_state_dict_pre_hook(_check_scales)

    def gate(self, j: int) -> SkipGate | None:
        """Return the gate of skip j, or None if its factors are fixed."""
        return self.gates[j % len(self.gates)] if self.gates else None

    def forward(self, j: int, state: Float[Tensor, "b n d"], as_tensors: bool = False) -> MergeWeights:
        """Return the factors of skip j; fixed ones are tensors with `as_tensors`, see `decay.branch_weights`."""
        gate = self.gate(j)
        if gate is not None:
            return MergeWeights(gate(state), 1.0)
        return MergeWeights(*self.scales[:, j]) if as_tensors else self.fixed[j]


def build_long_skips(config: Mapping[str, Any], shortcuts: decay.Shortcuts, plan: SkipPlan) -> LongSkips | None:
    """Return the factors of the long skips of a network, None for plain ones, which cost nothing.

    Args:
        config: arguments of the network: `skip_scale`, and the arguments of `decay.shortcuts`.
        shortcuts: the shortcuts of the network.
        plan: where skips begin and end.

    Raises:
        UserError: an unknown kind, a value out of its range, or a kind that does not fit the network.
    """
    scale, count = config["skip_scale"], len(plan.sources)
    if not isinstance(scale, str):
        check_numbers("(0, 1000]", skip_scale=scale)
        if scale == 1:
            return None
    if not count:
        raise UserError(f"skip_scale {scale}: this network has no long skips; set skip_scale to 1")
    plain = [1.0] * count
    if not isinstance(scale, str):
        return LongSkips([[float(scale)] * count, plain], 0, plan.tokens)
    kind, colon, text = scale.partition(":")
    check_choice(SKIP_SCALES, skip_scale=kind)
    if kind == "kappa":
        kappa = _parsed_value(scale, text) if colon else KAPPA
        return LongSkips([[kappa ** (s // plan.every - 1) for s in plan.sources], plain], 0, plan.tokens)
    if kind == "stream":
        alpha_min = _alpha_min_of_stream(config, shortcuts, text if colon else None)
        return LongSkips(_stream_factors(config, alpha_min, len(shortcuts.alphas) // 2, plan), 0, plan.tokens)
    _check_gates(scale, kind, plan.tokens)
    return LongSkips([[], []], count if kind == "learned-each" else 1, plan.tokens)


def _parsed_value(scale: str, text: str) -> float:
    """Return the number after the colon of `scale`, which must lie in (0, 1]."""
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"skip_scale {scale}: {text!r} is not a number; give one in (0, 1], as in kappa:0.7") from None
    check_numbers("(0, 1]", **{f"the value of skip_scale {scale}": value})
    return value


def _alpha_min_of_stream(config: Mapping[str, Any], shortcuts: decay.Shortcuts, text: str | None) -> float:
    """Return the alpha_min whose P scales the skips; raise a UserError where skips carry such a factor already."""
    schedule, scale = config["schedule"], config["skip_scale"]
    if text is None:
        if schedule != "gain":
            raise UserError(
                f"skip_scale {scale} takes its factors from the schedule gain, this network has {schedule!r}; "
                "set schedule to gain, or give an alpha_min: stream:0.8"
            )
        return config["alpha_min"]
    if shortcuts.depth is not None:
        raise UserError(
            f"skip_scale {scale}: the schedule {schedule} has no stream; set skip_scale to a number or kappa"
        )
    if shortcuts.learned == "alphas" or set(shortcuts.alphas) != {1.0}:
        raise UserError(
            f"skip_scale {scale}: the schedule {schedule!r} with alpha_min {config['alpha_min']} has alphas other than "
            "1, so that skips carry factors of their own; set schedule to gain, or alpha_min to 1"
        )
    return _parsed_value(scale, text)


def _stream_factors(config: Mapping[str, Any], alpha_min: float, blocks: int, plan: SkipPlan) -> list[list[float]]:
    """Return the factors c and d that the decay of this alpha_min gives each skip (docs/how_it_works.md)."""
    ablations = (config[name] for name in ("granularity", "index", "branches"))
    alphas = decay.shortcuts(blocks, alpha_min, "linear", *ablations).alphas
    products = [1.0, *accumulate(alphas, mul)]  # P before each branch
    at_sources = [products[2 * source] for source in plan.sources]
    at_merges = [products[2 * merge] for merge in plan.merges] or [1.0] * len(at_sources)
    skips = [source / merge for source, merge in zip(at_sources, at_merges, strict=True)]
    return [skips, [1.0 / merge for merge in at_merges]]


def _check_gates(scale: str, kind: str, tokens: int) -> None:
    if scale != kind:
        raise UserError(f"skip_scale {scale}: {kind} takes no value; set skip_scale to {kind}")
    if tokens < REDUCTION:
        raise UserError(
            f"skip_scale {scale}: its gates need at least {REDUCTION} tokens, this network has {tokens}; "
            "use smaller patches, or kappa"
        )


def scaled_skip(state: Tensor, weights: MergeWeights | None) -> Tensor:
    """Return c s, and s itself without weights."""
    return state if weights is None else state * weights.skip


def merge_linear(layer: nn.Linear, x: Tensor, weights: MergeWeights | None) -> Tensor:
    """Return W x + d b, and layer(x) itself without weights."""
    if weights is None:
        return layer(x)
    return linear(x, layer.weight, layer.bias * weights.bias)


def _check_scales(skips: LongSkips, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Raise a UserError for weights that were trained with other factors.

    Official files hold no factors; `DecayedNet` adds the network's factors before this check.
    """
    value = state.get(f"{prefix}scales", torch.empty(0))
    rounding = max(torch.finfo(value.dtype).eps, torch.finfo(torch.float32).eps)
    expected = torch.tensor([[pair.skip for pair in skips.fixed], [pair.bias for pair in skips.fixed]])
    stored = value.detach().cpu().float()
    if stored.shape != expected.shape or not torch.allclose(stored, expected, rtol=rounding, atol=rounding):
        found = "1" if not value.numel() else f"{stored.flatten()[0]:.4g} .. {stored[0].flatten()[-1]:.4g}"
        wanted = f"{skips.fixed[0].skip:.4g} .. {skips.fixed[-1].skip:.4g}"
        raise UserError(
            f"the weights were trained with long skips of scale {found}, this network has {wanted}: "
            "set skip_scale and alpha_min to match"
        )
