"""Parameters and buffers that a task holds beside its network: which are trained, and their names in checkpoints.

The state_dict of a task holds its network as `net.*` and everything else as `task.*`, such as
`task.projector.weight`. Programs that read the network of a checkpoint skip `task.*`.
A frozen module, all of whose parameters have requires_grad False, is left out: the task builds it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from uvit_decay.checkpoint.io import NET, OWN


def own_parameters(task: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trained parameters beside the network, with their names in checkpoints; shared ones occur once."""
    found = []
    for name, parameter in task.named_parameters():
        if parameter.requires_grad and not name.startswith(NET):
            found.append((OWN + name, parameter))
    return found


def own_tensors(task: nn.Module) -> list[Tensor]:
    """Return all parameters and buffers beside the network, frozen ones too."""
    tensors = [*task.named_parameters(), *task.named_buffers()]
    return [value for name, value in tensors if not name.startswith(NET)]


def name_own_state(task: nn.Module) -> None:
    """Make `task.state_dict()` and `task.load_state_dict()` use the names in this module's docstring."""
    task.register_state_dict_post_hook(_rename_for_saving)
    task.register_load_state_dict_pre_hook(_rename_for_loading)


def _rename_for_saving(task: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Add the prefix to all names outside the network, in place, and leave out frozen modules."""
    frozen = tuple(prefix + name for name in _find_frozen(task))
    for name in list(state):
        if name.startswith(prefix + NET):
            continue
        value = state.pop(name)
        if not name.startswith(frozen):
            state[f"{prefix}{OWN}{name.removeprefix(prefix)}"] = value


def _rename_for_loading(task: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Undo `_rename_for_saving` in place; frozen modules keep the values that they have."""
    for name in list(state):
        if name.startswith(prefix + OWN):
            state[prefix + name.removeprefix(prefix + OWN)] = state.pop(name)
    for module in _find_frozen(task):
        part = task.get_submodule(module.rstrip("."))
        part.state_dict(destination=state, prefix=prefix + module)


def _find_frozen(task: nn.Module) -> Iterator[str]:
    """Yield the names of the outermost frozen modules beside the network, each with a dot at its end."""
    found: tuple[str, ...] = ()
    for name, module in task.named_modules():
        inside = f"{name}."
        if not name or inside.startswith((NET, *found)):
            continue
        gradients = [parameter.requires_grad for parameter in module.parameters()]
        if gradients and not any(gradients):
            found += (inside,)
            yield inside
