"""Checks before a run resumes from a checkpoint: is the file intact, is its function the same, what else differs."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import lightning
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.instantiate import renamed
from uvit_decay.runtime.plain import is_plain

if TYPE_CHECKING:
    from uvit_decay.tasks.base import Task

Settings = Mapping[str, Any]  # values by flag without dashes: {"model.optim.lr": 1e-4}

NOT_THE_FUNCTION = ("init", "zero_init", "skip_zero_init", "checkpointing")  # network arguments that may differ
MISSING = "nothing"
COUNT = 0  # in a template: any non-negative int below MOST
MOST = 2**48  # exclusive bound of counts
SPEC = {"class_path": "", "init_args": {}}
HEAD = {"pytorch-lightning_version": "", "global_step": COUNT, "epoch": COUNT, "callbacks": {}, "uvit_decay": {}}


def check(contents: Mapping[str, Any], task: Task, trainer: Trainer, where: str) -> None:
    """Raise a UserError if this run cannot resume from a checkpoint.

    Network, path, prediction and weighting must be the task's. Tensors must be finite and have the shapes and dtypes of
    this run's: the fused optimizer would read beyond the end of moments that are too small.

    Args:
        contents: contents of the checkpoint.
        task: task of this run.
        trainer: trainer of this run.
        where: name of the checkpoint in errors.

    Raises:
        UserError: the checkpoint is damaged, contradicts itself or belongs to another function.
    """
    own = task.function()
    _refuse(_unlike(contents, HEAD), where)
    _refuse(_contradictions(contents), where)
    stored = renamed(contents["uvit_decay"])
    known = {part: value for part, value in own.items() if part in stored or part != "weighting"}  # older files lack it
    _refuse(_unlike(stored, {part: SPEC if isinstance(value, dict) else "" for part, value in known.items()}), where)
    _check_function({part: stored[part] for part in known}, known, where)
    _refuse(_unlike(contents, _template(contents, task, trainer)), where)
    _refuse(_steps(contents), where)


def _check_function(stored: Mapping[str, Any], own: Mapping[str, Any], where: str) -> None:
    """Raise a UserError that names the first flag in which the checkpoint's function differs from this run's."""
    was, now = _values(stored, own), _values(own, own)
    for name in was | now:
        found, wanted = was.get(name, MISSING), now.get(name, MISSING)
        if found != wanted and name.rpartition(".")[2] not in NOT_THE_FUNCTION:
            raise UserError(
                f"{where} was trained with {name} {found}, this run has {wanted}: set --model.{name} {found}"
            )


def _values(function: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function flat: {"prediction": "eps", "net": class path, "net.heads": 2, ...}, defaults included."""
    values = {}
    for part, mine in own.items():
        values[part] = value = function[part]
        if not isinstance(mine, dict):
            continue
        kind = _named(mine["class_path"])
        values[part] = value["class_path"]
        if _named(value["class_path"]) == kind:
            values[part] = mine["class_path"]
            defaults = {p.name: p.default for p in inspect.signature(kind).parameters.values()}
            values |= {f"{part}.{name}": _plain(item) for name, item in {**defaults, **value["init_args"]}.items()}
    return values


def _named(class_path: str) -> Any:
    """Return the class that an imported module has under this path, its own or a re-export; without one the path."""
    module, _, name = class_path.rpartition(".")
    return getattr(sys.modules.get(module), name, class_path)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def changes(contents: Mapping[str, Any], settings: Settings, least: Settings) -> str:
    """Return one line with all settings that differ from those of the run that wrote a checkpoint; empty if none does.

    Args:
        contents: contents of the checkpoint.
        settings: settings of this run; empty if they are not known.
        least: `lr`, `betas`, `weight_decay` and `data` of this run; compared with the checkpoint's optimizer and data
            if it or this run has no settings.
    """
    before, now = renamed(contents.get("settings")), settings
    if not (before and now):
        group = contents["optimizer_states"][0]["param_groups"][0]
        before = {**group, "lr": group["initial_lr"], "data": contents["uvit_decay"].get("data")}
        before, now = {name: _plain(before[name]) for name in least}, least
    different = [name for name in {**before, **now} if before.get(name, MISSING) != now.get(name, MISSING)]
    return ", ".join(f"{name} {now.get(name, MISSING)} (was {before.get(name, MISSING)})" for name in different)


def _refuse(problems: Iterator[str], where: str) -> None:
    for problem in problems:
        raise UserError(f"{where} is damaged, or of another network: {problem}")


def _template(contents: Mapping[str, Any], task: Task, trainer: Trainer) -> dict[str, Any]:
    """Return an example of a checkpoint of this run: values of the right types, tensors of the right shapes."""
    parameters = dict(task.net.named_parameters())
    moments = {
        i: {"step": torch.tensor(0.0), "exp_avg": p, "exp_avg_sq": p}
        for i, p in enumerate(parameters.values())
        if p.requires_grad and contents["global_step"]
    }
    group = {"initial_lr": 0.0, "betas": (0.0, 0.0), "weight_decay": 0.0}
    loops = {"fit_loop": trainer.fit_loop.state_dict(), "validate_loop": trainer.validate_loop.state_dict()}
    loops["fit_loop"]["state_dict"] = {"combined_loader": [{"start": COUNT}]}
    if contents["pytorch-lightning_version"] != lightning.__version__:
        loops = _common(loops, contents.get("loops"))
    ema = {"EMA": {"shadow": parameters, "updates": COUNT}} if "EMA" in contents["callbacks"] else {}
    return {
        "state_dict": dict(task.state_dict()),
        "callbacks": ema,
        "optimizer_states": [{"state": moments, "param_groups": [group]}],
        "lr_schedulers": [{"last_epoch": COUNT}],
        "loops": loops,
    }


def _common(wanted: Any, found: Any) -> Any:
    """Return `wanted` without the keys that `found`, written by another version of Lightning, lacks."""
    if not (isinstance(wanted, dict) and isinstance(found, dict)):
        return wanted
    return {key: _common(value, found[key]) for key, value in wanted.items() if key in found}


def _unlike(found: Any, wanted: Any, name: str = "") -> Iterator[str]:
    """Yield the differences in form of `found` from `wanted`; extra keys count only in dicts that hold tensors."""
    if isinstance(wanted, Tensor):
        yield from _unlike_tensor(found, wanted, name)
    elif type(found) is not type(wanted) and not _alike(found, wanted):
        yield f"{name} is {_shown(found)}, not {_shown(wanted)}"
    elif isinstance(wanted, dict):
        strict = any(isinstance(value, Tensor) for value in wanted.values())
        for key in wanted.keys() | (found.keys() if strict else ()):
            place = f"{name}.{key}".lstrip(".")
            if key not in found or key not in wanted:
                yield f"{place} is {'missing' if key in wanted else 'too much'}"
            else:
                yield from _unlike(found[key], wanted[key], place)
    elif isinstance(wanted, list | tuple):
        if len(found) != len(wanted):
            yield f"{name} has {len(found)} entries, not {len(wanted)}"
        for i, (item, own) in enumerate(zip(found, wanted, strict=False)):
            yield from _unlike(item, own, f"{name}.{i}")
    elif type(wanted) is int and not 0 <= found < MOST:
        yield f"{name} is out of range"


def _alike(found: Any, wanted: Any) -> bool:
    """Return whether `found` is a subclass of dict for a dict, a list for a tuple or an int for a float."""
    kinds = {dict: dict, tuple: list | tuple, float: int}
    return isinstance(found, kinds.get(type(wanted), ())) and not isinstance(found, bool)


def _unlike_tensor(found: Any, wanted: Tensor, name: str) -> Iterator[str]:
    plain = isinstance(found, Tensor) and found.layout == torch.strided and found.device.type == "cpu"
    if not plain or found.shape != wanted.shape or found.dtype != wanted.dtype:
        yield f"{name} is {_shown(found)}, not {_shown(wanted)}"
    elif not (found.is_contiguous() or found.stride() == wanted.stride()):
        yield f"{name} is not contiguous"
    elif not torch.isfinite(found).all():
        yield f"{name} is not finite"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {value.dtype}"
    return f"a {type(value).__name__}"


def _contradictions(contents: Mapping[str, Any]) -> Iterator[str]:
    """Yield wrong values of the Lightning version, the description, the settings and the number of pieces."""
    if not re.fullmatch(r"[2-9](\.\d+)+(\.?(a|b|rc|post|dev)\d+)*", contents["pytorch-lightning_version"]):
        yield f"pytorch-lightning_version is {contents['pytorch-lightning_version']!r:.40}"
    for name in ("uvit_decay", "settings"):
        if not (isinstance(contents.get(name, {}), dict) and is_plain(contents.get(name))):
            yield f"{name} holds more than names and plain values"
    pieces = contents["uvit_decay"].get("pieces", 1)
    if not (type(pieces) is int and 0 < pieces < MOST):
        yield f"uvit_decay.pieces is {pieces!r:.40}"


def _steps(contents: Mapping[str, Any]) -> Iterator[str]:
    """Yield step counts and second moments that contradict `global_step`, of contents of the right form."""
    step = contents["global_step"]
    progress = contents["loops"]["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"]
    counts = {
        "loops": progress["optimizer"]["step"]["total"]["completed"],
        "lr_schedulers": contents["lr_schedulers"][0]["last_epoch"],
    }
    for name, count in counts.items():
        if count != step:
            yield f"{name} are at step {count}, global_step is {step}"
    for i, moments in contents["optimizer_states"][0]["state"].items():
        if not 0 < moments["step"] <= step:
            yield f"optimizer_states.0.state.{i}.step is {moments['step']:g}, global_step is {step}"
        if (moments["exp_avg_sq"] < 0).any():
            yield f"optimizer_states.0.state.{i}.exp_avg_sq is negative"
