"""Named intermediates: what a network shows to probes.

A tapped network yields its token states one stage after the other, so that a probe reads all layers in one forward pass
and never touches a compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.errors import UserError

Pool = Literal["mean", "all"]


@dataclass(frozen=True)
class Stage:
    """A place in a network: `name` is the module whose output it is, stage 0 the embeddings, stage i after block i."""

    name: str
    kind: Literal["embeddings", "encoder", "middle", "decoder"]


@runtime_checkable
class Tapped(Protocol):
    """A network that can be probed: tokens have `dim` features, the first `extras` are no patches (time, label)."""

    stages: tuple[Stage, ...]
    extras: int
    dim: int

    def trunk(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Iterator[Tensor]:
        """Token states (b, n, d), one for each stage, in order."""


def places(stages: Sequence[Stage], names: Sequence[str] | None) -> list[int]:
    """Numbers of the stages with these numbers or names, ascending; None means all.

    Raises:
        UserError: one that is not there.
    """
    if names is None:
        return list(range(len(stages)))
    known = {**{str(i): i for i in range(len(stages))}, **{stage.name: i for i, stage in enumerate(stages)}}
    unknown = [name for name in names if name not in known]
    if unknown:
        there = ", ".join(stage.name for stage in stages)
        raise UserError(f"no layer {unknown[0]}: there are 0 to {len(stages) - 1}, or {there}")
    return sorted({known[name] for name in names})


def pooled_features(
    net: Tapped, x: Float[Tensor, "b c h w"], t: Float[Tensor, " b"], pool: Pool = "mean"
) -> Float[Tensor, "stages b d"]:
    """Float32 mean of the patch tokens (`pool` all: of all tokens) after every stage, under the null label."""
    first = net.extras if pool == "mean" else 0
    return torch.stack([state[:, first:].float().mean(dim=1) for state in net.trunk(x, t)])


@torch.no_grad()
def module_features(
    model: nn.Module, names: Sequence[str], run: Callable[[], object], extras: int = 0
) -> Float[Tensor, "stages b d"]:
    """The same of any model: of the outputs of its modules with these names, while `run` calls it once.

    Args:
        model: whose modules give token states (b, n, d), or tuples that begin with them.
        names: of the modules, as `named_modules` has them.
        run: calls the model on a batch.
        extras: so many first tokens of each state are no patches.

    Raises:
        AttributeError: no module of that name.
        KeyError: one that the model did not call.
    """
    found: dict[str, Tensor] = {}

    def keep(name: str, output: Tensor | tuple[Tensor, ...]) -> None:
        state = output if isinstance(output, Tensor) else output[0]
        found[name] = state[:, extras:].float().mean(dim=1)

    modules = {name: model.get_submodule(name) for name in names}
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: keep(name, output))
        for name, module in modules.items()
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([found[name] for name in names])
