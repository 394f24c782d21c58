"""Checks of the tensors and counters of a checkpoint: names, shapes, dtypes and values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from uvit_decay.checkpoint.io import TrainingContents
from uvit_decay.runs.counters import count_global_batches
from uvit_decay.runtime.tensor_files import has_values

MOST = 2**48  # exclusive bound of counters
VERSION = "pytorch-lightning_version"
MIXED = "MixedPrecision"  # Lightning's name of the state of a gradient scaler
SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
SKIPPED, IN_A_ROW = "skipped_steps", "skipped_in_a_row"  # counts of steps that the scaler has skipped
STEP = torch.zeros((), dtype=torch.float32)  # form of a parameter's step count
LIGHTNING = re.compile(r"[2-9](\.\d+)+(\.?(a|b|rc|post|dev)\d+)*")
MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)  # raised by contents of another form


def check_form(contents: Mapping[str, Any], stored: TrainingContents, task: LightningModule, positioned: bool) -> None:
    """Raise one of MALFORMED unless weights, averages and moments have the form of this run's, and all counters exist.

    A parameter that never had a gradient has no moments. Of an optimizer by class path, they only have to be finite.

    Args:
        contents: contents of the checkpoint.
        stored: their parts of known types.
        task: task of this run.
        positioned: whether the number of global batches is needed, too.
    """
    # Lightning compares this version with its own when it loads the file, and fails on other text.
    version = contents[VERSION]
    if not LIGHTNING.fullmatch(version):
        raise ValueError(f"{VERSION} is {version!r:.40}")
    check_tensors(stored.state_dict, task.state_dict(), "state_dict")
    if stored.average:
        check_tensors(stored.average, dict(task.net.named_parameters()), "ema")
    ema = stored.callbacks.get("EMA")
    (optimizer,) = contents["optimizer_states"]
    (schedule,) = contents["lr_schedulers"]
    _check_optimizer(optimizer, task)
    _check_scaler(contents.get(MIXED) or {})
    counters = {
        "global_step": contents["global_step"],
        "epoch": contents["epoch"],
        "images_seen": contents.get("images_seen", 0),
        "the number of EMA updates": ema["updates"] if ema else 0,
        "last_epoch of the schedule": schedule["last_epoch"],
        SKIPPED: contents.get(SKIPPED, 0),
        IN_A_ROW: contents.get(IN_A_ROW, 0),
        "the number of global batches": count_global_batches(contents) if positioned else 0,
    }
    for name, count in counters.items():
        if not isinstance(count, int) or not 0 <= count < MOST:
            raise ValueError(f"{name} is {count!r:.40}, not an integer in [0, 2**48)")


def _check_optimizer(stored: Mapping[str, Any], task: LightningModule) -> None:
    """Raise an error unless a stored optimizer has the groups of this run, and a state that fits its parameters.

    The state is compared in the file. `Optimizer.load_state_dict` would cast integers to floats, and FSDP would shard
    tensors of any shape.
    """
    groups = task.group_parameters(1.0)  # the settings of the stored groups are not used
    if _count_parameters(stored["param_groups"]) != _count_parameters(groups):
        raise ValueError("its optimizer has other groups of parameters")
    members = []
    for group in groups:
        for parameter in group["params"]:
            members.append((parameter, group))
    for i, state in stored["state"].items():
        parameter, group = members[i]
        where = f"optimizer_states.0.state.{i}"
        names = task.optim.state_names(group)
        if names is None:
            _check_finite(state, where)
        else:
            expected = {name: STEP if name == "step" else parameter for name in names}
            check_tensors(state, expected, where)


def _check_scaler(state: Mapping[str, Any]) -> None:
    """Raise an error unless a stored gradient scaler has all its numbers; a run in another precision has none."""
    if state:
        for name in SCALER:
            if not isinstance(state[name], int | float) or not 0 <= state[name] < math.inf:
                raise ValueError(f"{MIXED}.{name} is {state[name]!r:.40}, not a number from 0")


def _count_parameters(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _check_finite(state: Mapping[str, Any], where: str) -> None:
    """Raise an error unless the tensors and floats of an optimizer by class path are finite.

    Their names, shapes and types are known only to the class: Adafactor keeps rows and columns.
    """
    for name, value in state.items():
        if isinstance(value, Tensor):
            finite = has_values(value) and bool(value.isfinite().all())
        else:
            finite = not isinstance(value, float) or math.isfinite(value)
        if not finite:
            raise ValueError(f"{where}.{name} is not finite")


def check_tensors(stored: Mapping[str, Any], ours: Mapping[str, Tensor], where: str) -> None:
    """Raise an error unless `stored` are finite tensors with the names, shapes, dtypes and strides of `ours`.

    Args:
        stored: tensors of the checkpoint.
        ours: tensors of this run.
        where: place of the tensors in the checkpoint, for errors.
    """
    different = stored.keys() ^ ours.keys()
    if different:
        name = min(different)
        problem = "is missing" if name in ours else "is not expected"
        raise ValueError(f"{where}.{name} {problem}")
    for name, expected in ours.items():
        actual = stored[name]
        if not _has_form(actual, expected) or not torch.isfinite(actual).all():
            raise ValueError(f"{where}.{name} is not finite, or not {tuple(expected.shape)} of {expected.dtype}")


def _has_form(actual: Any, expected: Tensor) -> bool:
    """Return whether a value is a tensor with data, and with the shape, dtype and strides of another one."""
    if not isinstance(actual, Tensor) or not has_values(actual):
        return False
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return actual.is_contiguous() or actual.stride() == expected.stride()
