"""Checks before a run resumes from a checkpoint: is the file intact, and is its function the same."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import lightning
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from uvit_decay.checkpoint.averages import extras
from uvit_decay.checkpoint.card import KEY, ModelCard
from uvit_decay.data.classes import class_hash
from uvit_decay.data.datamodule import ImageData
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.instantiate import Spec, renamed
from uvit_decay.runtime.plain import is_plain
from uvit_decay.tasks.optimization import Optimization
from uvit_decay.tasks.settings import (
    MISSING,
    Change,
    Settings,
    allows,
    changes,
    decides,
    differences,
    named_class,
    plain,
    refusal,
)
from uvit_decay.tasks.skips import KEY as SKIPPED

if TYPE_CHECKING:
    from uvit_decay.tasks.base import Task

NOT_THE_FUNCTION = ("init", "zero_init", "skip_zero_init", "checkpointing")  # network arguments that may differ
COUNT = 0  # in a template: any non-negative int below MOST
MOST = 2**48  # exclusive bound of counts
HEAD = {"pytorch-lightning_version": "", "global_step": COUNT, "epoch": COUNT, "callbacks": {}, KEY: {}}


def check(contents: Mapping[str, Any], task: Task, trainer: Trainer, where: str, trains: bool = False) -> ModelCard:
    """Raise a UserError if this run cannot resume from a checkpoint; return its model card.

    Network, path, prediction and weighting must be the task's, and if it `trains` all settings that decide how training
    goes on, unless `task.allowed` names them. Tensors must be finite and have the shapes and dtypes of this run's: the
    fused optimizer would read beyond the end of moments that are too small.

    Args:
        contents: contents of the checkpoint.
        task: task of this run.
        trainer: trainer of this run.
        where: name of the checkpoint in errors.
        trains: whether the run goes on with the training.
    """
    _refuse(_unlike(contents, HEAD), where)
    _refuse(_contradictions(contents), where)
    card = ModelCard.from_dict(contents[KEY], where)
    _check_settings(contents, card, task, where, trains)
    _refuse(_unlike(contents, _template(contents, task, trainer)), where)
    _refuse(_steps(contents), where)
    return card


def _check_settings(contents: Mapping[str, Any], card: ModelCard, task: Task, where: str, trains: bool) -> None:
    """Raise a UserError that names all differences between this run and the checkpoint's which are not allowed."""
    before = renamed(contents.get("settings") or {})
    fixed, open_ = list(_other_optimizer(before, task)), []
    parts = ((part, getattr(card, part), ours) for part, ours in task.function().items())
    if function := [Change(*change, f"model.{change[0]}") for part in parts for change in part_differences(*part)]:
        (open_ if _same_tensors(contents.get("state_dict"), task) else fixed).extend(function)
    if trains and before and task.settings:
        known = tuple(change.flag or change.name for change in (*fixed, *open_))
        others = (change for change in differences(before, task.settings) if decides(change.name))
        open_ += [change for change in others if not allows(known, change.name)]
    open_ = [change for change in open_ if not allows(task.allowed, change.flag or change.name)]
    if fixed or open_:
        raise UserError(refusal(where, fixed, open_))


def _same_tensors(stored: Any, task: Task) -> bool:
    """Return whether stored weights have the form of the task's, and its alphas and betas, which are no weights."""
    ours = dict(task.state_dict())
    if any(_unlike(stored, ours)):
        return False
    fixed = [name for name in ours if name.endswith((".alphas", ".betas"))]
    return all(torch.equal(stored[name], ours[name].cpu()) for name in fixed)


def _other_optimizer(before: Settings, task: Task) -> Iterator[Change]:
    """Yield what gives the state of this run's optimizer another form or order than the checkpoint's has."""
    flags = {f"model.optim.{name}": getattr(task.optim, name) for name in ("optimizer", "decay_on", "layer_decay")}
    defaults = {f"model.optim.{field.name}": field.default for field in fields(Optimization)}
    for flag, ours in {**flags, "model.frozen": task.frozen}.items():
        stored = before.get(flag, defaults.get(flag, False))
        if before and stored != ours:
            yield Change(flag, stored, ours)


def check_changes(contents: Mapping[str, Any], card: ModelCard, task: Task, data: ImageData, optim: Settings) -> str:
    """Return one line with all settings that differ from the checkpoint's, empty if none does; the data are set up.

    Raises:
        UserError: a run of train.py has other data, or with a checkpoint without settings another optimizer, and
            `task.allowed` does not name them.
    """
    found = changes(contents, card, task.settings, {**optim, "data": data.name})
    if card.data_hash == data.fingerprint:  # the same images, in another place
        found = [change for change in found if change.name not in ("data", "data.path")]
    elif card.data_hash is not None:
        found = [change for change in found if change.name != "data"]
        hashes = (
            f"{name} ({value[:8]})" for name, value in ((card.data, card.data_hash), (data.name, data.fingerprint))
        )
        found.append(Change("data", *hashes, ""))
    refused = [
        change for change in found if decides(change.name) and not allows(task.allowed, change.flag or change.name)
    ]
    if refused and task.settings:
        raise UserError(refusal("the checkpoint", (), refused))
    return ", ".join(map(str, found))


def check_data(card: ModelCard, data: ImageData, conditional: bool, allowed: Sequence[str] = ()) -> None:
    """Raise a UserError if classes, autoencoder or latent scale of the data differ from the checkpoint's."""
    ours = class_hash(data.class_names)
    if conditional and card.class_hash not in (None, ours) and not allows(allowed, "data.classes"):
        raise UserError(
            f"the checkpoint was trained on classes of sha256 {card.class_hash[:12]}, {data.name} has {ours[:12]}"
        )
    if (card.latents is None) != (data.latents is None):
        kinds = ("latents", "pixels") if card.latents else ("pixels", "latents")
        raise UserError(f"the checkpoint was trained on {kinds[0]}, {data.name} has {kinds[1]}")
    if card.latents:
        card.latents.check_same(data.latents, "the checkpoint", data.name)


def part_differences(part: str, stored: Spec | str | None, ours: Spec | str) -> Iterator[tuple[str, Any, Any]]:
    """Yield flag, stored value and value of this run where a part of the function differs.

    Arguments that are not given have the defaults of the class. A part that older files lack, None, is not compared.
    """
    if not (isinstance(stored, Spec) and isinstance(ours, Spec)):
        if stored not in (None, ours):
            yield part, stored, ours
    elif named_class(stored.class_path) != named_class(ours.class_path):
        yield part, stored.class_path, ours.class_path
    else:
        parameters = inspect.signature(named_class(ours.class_path)).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        then, now = ({**defaults, **spec.init_args} for spec in (stored, ours))
        for name in then | now:
            value, expected = plain(then.get(name, MISSING)), plain(now.get(name, MISSING))
            if value != expected and name not in NOT_THE_FUNCTION:
                yield f"{part}.{name}", value, expected


def _refuse(problems: Iterator[str], where: str) -> None:
    for problem in problems:
        raise UserError(f"{where} is damaged, or of another network: {problem}")


def _template(contents: Mapping[str, Any], task: Task, trainer: Trainer) -> dict[str, Any]:
    """Return an example of a checkpoint of this run: values of the right types, tensors of the right shapes."""
    parameters = dict(task.net.named_parameters())
    optimizer = task.optim.example(task.net, begun=contents["global_step"] > 0)
    loops = {"fit_loop": trainer.fit_loop.state_dict(), "validate_loop": trainer.validate_loop.state_dict()}
    loops["fit_loop"]["state_dict"] = {"combined_loader": [{"start": COUNT}]}
    if contents["pytorch-lightning_version"] != lightning.__version__:
        loops = _common(loops, contents.get("loops"))
    kept = contents["callbacks"]
    ema = {"EMA": _averages(kept["EMA"], parameters)} if "EMA" in kept else {}
    return {
        **({SKIPPED: COUNT} if SKIPPED in contents else {}),
        "state_dict": dict(task.state_dict()),
        "callbacks": ema,
        "optimizer_states": [optimizer],
        "lr_schedulers": [{"last_epoch": COUNT}],
        "loops": loops,
    }


def _averages(state: Any, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return an example of the state of the callback EMA, with as many averages as `state` has."""
    one = {"shadow": parameters, "updates": COUNT}
    if not (isinstance(state, dict) and "extra" in state):
        return one
    return one | {"decay": 0.0, "extra": dict.fromkeys(extras(state, "the checkpoint"), one)}


def _common(expected: Any, actual: Any) -> Any:
    """Return `expected` without the keys that `actual`, written by another version of Lightning, lacks."""
    if not (isinstance(expected, dict) and isinstance(actual, dict)):
        return expected
    return {key: _common(value, actual[key]) for key, value in expected.items() if key in actual}


def _unlike(actual: Any, expected: Any, name: str = "") -> Iterator[str]:
    """Yield the differences in form of `actual` from `expected`; extra keys count only in dicts that hold tensors."""
    if isinstance(expected, Tensor):
        yield from _unlike_tensor(actual, expected, name)
    elif type(actual) is not type(expected) and not _alike(actual, expected):
        yield f"{name} is {_shown(actual)}, not {_shown(expected)}"
    elif isinstance(expected, dict):
        strict = any(isinstance(value, Tensor) for value in expected.values())
        for key in expected.keys() | (actual.keys() if strict else ()):
            place = f"{name}.{key}".lstrip(".")
            if key not in actual or key not in expected:
                yield f"{place} is {'missing' if key in expected else 'too much'}"
            else:
                yield from _unlike(actual[key], expected[key], place)
    elif isinstance(expected, list | tuple):
        if len(actual) != len(expected):
            yield f"{name} has {len(actual)} entries, not {len(expected)}"
        for i, (item, example) in enumerate(zip(actual, expected, strict=False)):
            yield from _unlike(item, example, f"{name}.{i}")
    elif type(expected) is int and not 0 <= actual < MOST:
        yield f"{name} is out of range"


def _alike(actual: Any, expected: Any) -> bool:
    """Return whether `actual` is a subclass of dict for a dict, a list for a tuple or an int for a float."""
    kinds = {dict: dict, tuple: list | tuple, float: int}
    return isinstance(actual, kinds.get(type(expected), ())) and not isinstance(actual, bool)


def _unlike_tensor(actual: Any, expected: Tensor, name: str) -> Iterator[str]:
    plain = isinstance(actual, Tensor) and actual.layout == torch.strided and actual.device.type == "cpu"
    if not plain or actual.shape != expected.shape or actual.dtype != expected.dtype:
        yield f"{name} is {_shown(actual)}, not {_shown(expected)}"
    elif not (actual.is_contiguous() or actual.stride() == expected.stride()):
        yield f"{name} is not contiguous"
    elif not torch.isfinite(actual).all():
        yield f"{name} is not finite"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {value.dtype}"
    return f"a {type(value).__name__}"


def _contradictions(contents: Mapping[str, Any]) -> Iterator[str]:
    """Yield wrong values of the Lightning version and the settings."""
    if not re.fullmatch(r"[2-9](\.\d+)+(\.?(a|b|rc|post|dev)\d+)*", contents["pytorch-lightning_version"]):
        yield f"pytorch-lightning_version is {contents['pytorch-lightning_version']!r:.40}"
    if not (isinstance(contents.get("settings", {}), dict) and is_plain(contents.get("settings"))):
        yield "settings holds more than names and plain values"


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
    least = 0 if contents.get(SKIPPED) else 1  # of steps that changed the moments
    for i, moments in contents["optimizer_states"][0]["state"].items():
        if not least <= moments.get("step", step) <= step:
            yield f"optimizer_states.0.state.{i}.step is {moments['step']:g}, global_step is {step}"
        if "exp_avg_sq" in moments and (moments["exp_avg_sq"] < 0).any():
            yield f"optimizer_states.0.state.{i}.exp_avg_sq is negative"
