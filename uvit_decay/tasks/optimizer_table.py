"""The table of optimizers, and optimizers of other projects by the paths of their classes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer, SparseAdam

from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.optimizers import LARS, MUON, Muon

Groups = Sequence[dict[str, Any]]  # parameters with their lr and weight_decay
FLAG, ARGUMENTS = "--model.optim.optimizer", "--model.optim.arguments"
OF_GROUPS = ("params", "lr", "weight_decay")  # arguments that the groups have
ADAM = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Rule:
    """An optimizer that has a name.

    Args:
        build: makes the optimizer of groups, the learning rate, betas and momentum.
        buffers: names of its tensors for each parameter, which have the parameter's shape.
        counts: whether it has a step count for each parameter, too.
        gain_power: the power of a branch's gain by which `rate_over_gain` divides the rate; None if there is none.
        whole: whether it needs whole matrices, which FSDP shards.
    """

    build: Callable[[Groups, float, tuple[float, float], float], Optimizer]
    buffers: tuple[str, ...]
    counts: bool = False
    gain_power: int | None = None
    whole: bool = False


OPTIMIZERS: dict[str, Rule] = {
    "adamw": Rule(
        lambda groups, lr, betas, momentum: AdamW(groups, lr, betas, fused=True), ADAM, counts=True, gain_power=1
    ),
    "muon": Rule(Muon, ADAM, counts=True, gain_power=1, whole=True),  # its matrices have one buffer, see `named_state`
    "lars": Rule(lambda groups, lr, betas, momentum: LARS(groups, lr, momentum), ("momentum_buffer",), whole=True),
    "sgd": Rule(lambda groups, lr, betas, momentum: SGD(groups, lr, momentum), ("momentum_buffer",), gain_power=2),
}


def named_state(name: str, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return an example of the state of a parameter after a step of a named optimizer: tensors of the right shapes."""
    if group.get(MUON):
        return {"momentum_buffer": parameter}
    rule = OPTIMIZERS[name]
    counts = {"step": torch.tensor(0.0)} if rule.counts else {}
    return counts | dict.fromkeys(rule.buffers, parameter)


def find_class(path: str) -> type[Optimizer]:
    """Return the class of an optimizer, of torch.optim or of a module that is imported already, as by --trust.

    Raises:
        UserError: no such class, or one that cannot train here.
    """
    module, _, name = path.rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    names = ", ".join(OPTIMIZERS)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        known = f"give one of {names}, or the class path of an optimizer such as torch.optim.NAdam"
        trust = f"; --trust {module} imports its module" if module else ""
        raise UserError(f"{FLAG} {path}: there is no such optimizer; {known}{trust}")
    if issubclass(kind, LBFGS | SparseAdam):
        needs = "sparse gradients" if issubclass(kind, SparseAdam) else "several losses in each step"
        raise UserError(f"{FLAG} {path}: it needs {needs}; give one of {names}, or another class")
    return kind


def build_class(path: str, arguments: Mapping[str, Any], groups: Groups, lr: float) -> Optimizer:
    """Return an optimizer of the class `path` with these groups, the rate `lr` and keyword `arguments`.

    Raises:
        UserError: a class or arguments that do not fit, or a weight decay that the class does not have.
    """
    kind, where = find_class(path), f"{FLAG} {path}"
    if given := [name for name in OF_GROUPS if name in arguments]:
        raise UserError(f"{ARGUMENTS} must not hold {given[0]}: set --model.optim.lr and --model.optim.weight_decay")
    with explained(f"{where} with {ARGUMENTS} {dict(arguments)}", Exception):  # a class may raise anything
        plain = [{name: value for name, value in group.items() if name != "weight_decay"} for group in groups]
        decays = any(group.get("weight_decay") for group in groups)
        if "weight_decay" in kind([nn.Parameter(torch.zeros(2, 2))], lr=lr, **arguments).defaults:
            return kind(groups, lr=lr, **arguments)
        if decays:
            raise UserError(f"{where} has no weight decay: set --model.optim.weight_decay 0")
        return kind(plain, lr=lr, **arguments)


def class_state(path: str, arguments: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter after a step of an optimizer by class path: of one like it, of zeros."""
    with explained(f"{FLAG} {path} cannot make a step", Exception):
        values = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype).zero_()
        twin = nn.Parameter(values)
        twin.grad = torch.zeros_like(twin)
        optimizer = build_class(path, arguments, [{**group, "params": [twin]}], group["lr"])
        optimizer.step()
    return dict(optimizer.state[twin])
