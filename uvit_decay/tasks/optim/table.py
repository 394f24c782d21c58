"""The table of optimizers, and optimizers of other projects by the paths of their classes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import SGD, AdamW, Optimizer

from uvit_decay.runtime.optimizers import LARS, Muon
from uvit_decay.terminal.errors import UserError, explain

Groups = Sequence[dict[str, Any]]  # parameters with their lr and weight_decay


@dataclass(frozen=True)
class Rule:
    """An optimizer that has a name.

    Args:
        build: function (groups, learning rate, betas, momentum, fused) -> optimizer; `fused` makes AdamW one kernel.
        gain_power: the power of a branch's gain by which `rate_over_gain` divides the rate; None if it does not work.
        whole: whether it needs whole matrices, which FSDP shards.
    """

    build: Callable[[Groups, float, tuple[float, float], float, bool], Optimizer]
    gain_power: int | None = None
    whole: bool = False


OPTIMIZERS: dict[str, Rule] = {
    "adamw": Rule(lambda groups, lr, betas, _, fused: AdamW(groups, lr, betas, fused=fused), gain_power=1),
    "muon": Rule(Muon, gain_power=1, whole=True),
    "lars": Rule(lambda groups, lr, _, momentum, __: LARS(groups, lr, momentum), whole=True),
    "sgd": Rule(lambda groups, lr, _, momentum, __: SGD(groups, lr, momentum), gain_power=2),
}


def build_class(path: str, arguments: Mapping[str, Any], groups: Groups, lr: float) -> Optimizer:
    """Return an optimizer of the class `path` with these groups, the rate `lr` and keyword `arguments`.

    It is a class of torch.optim, or of a module that is already imported, as by --trust.
    """
    module, _, name = path.rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        advice = f"give one of {', '.join(OPTIMIZERS)}, or the class path of an optimizer such as torch.optim.NAdam"
        if module and module not in sys.modules:
            advice += f"; --trust {module} imports its module"
        raise UserError(f"`optimizer` {path}: there is no such optimizer; {advice}")
    decays = [group["weight_decay"] for group in groups if group["weight_decay"]]
    of_all = {"weight_decay": decays[0]} if decays else {}  # a class without weight decay may train without
    hint = "`lr` and `weight_decay` are given to it, too; set the latter to 0 if it has none"
    what = f"`optimizer` {path} with `arguments` {dict(arguments)}"
    with explain(what, Exception, hint=hint):  # it may raise anything
        return kind(groups, lr=lr, **of_all, **arguments)
