"""Named intermediate token states of a network, for probes.

A network with this interface yields its token states stage by stage, so that one forward pass gives the features of all
layers without hooks, which would change a compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.runtime.errors import UserError

Pool = Literal["mean", "all"]


@dataclass(frozen=True)
class Stage:
    """Point of a network whose token state can be read: stage 0 is after the embeddings, stage i after block i.

    `name` is the name of the module whose output it is.
    """

    name: str
    kind: Literal["embeddings", "encoder", "middle", "decoder"]


@runtime_checkable
class Tapped(Protocol):
    """Network with readable token states: `dim` features a token, the first `extras` prefix tokens (time, label)."""

    stages: tuple[Stage, ...]
    extras: int
    dim: int

    def trunk(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Iterator[Tensor]:
        """Yield the token state (b, n, d) of each stage, in order."""


def places(stages: Sequence[Stage], names: Sequence[str] | None) -> list[int]:
    """Return the indices of the stages with these indices or names, ascending; None means all.

    Raises:
        UserError: a stage that does not exist.
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
    """Return the float32 mean of the patch tokens (pool "all": of all tokens) at every stage, with the null label."""
    first = net.extras if pool == "mean" else 0
    return torch.stack([state[:, first:].float().mean(dim=1) for state in net.trunk(x, t)])


@torch.no_grad()
def module_features(
    model: nn.Module, names: Sequence[str], run: Callable[[], object], extras: int = 0
) -> Float[Tensor, "stages b d"]:
    """Return the float32 mean of the patch tokens that the named modules of any model output while `run` calls it.

    Args:
        model: a model whose modules return token states (b, n, d), or tuples that begin with one.
        names: names of the modules, as in `named_modules`.
        run: calls the model on a batch, once.
        extras: number of prefix tokens of each state, which are left out.

    Raises:
        AttributeError: the model has no module of that name.
        KeyError: the model did not call a module.
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
