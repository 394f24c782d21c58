"""Checks of a checkpoint against the run that resumes from it, and the counters that are restored."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from uvit_decay.checkpoint.io import KEY, ModelCard, average, check_ours
from uvit_decay.class_names import class_hash
from uvit_decay.data.datamodule import ImageData
from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.instantiate import Spec
from uvit_decay.runtime.tensor_files import has_values
from uvit_decay.runtime.validation import is_plain
from uvit_decay.tasks.own import own_parameters
from uvit_decay.tasks.resumption.settings import (
    DECIDES,
    FORMS,
    MISSING,
    Change,
    allows,
    differences,
    effect,
    named_class,
    plain,
    refusal,
)

NOT_THE_FUNCTION = ("init", "zero_init", "skip_zero_init", "checkpointing")  # network arguments that may differ
MOST = 2**48  # exclusive bound of counts
VERSION = "pytorch-lightning_version"
LIGHTNING = re.compile(r"[2-9](\.\d+)+(\.?(a|b|rc|post|dev)\d+)*")
MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)  # what contents of another form raise


def check(
    contents: Mapping[str, Any], task: LightningModule, where: str, trains: bool = False, positioned: bool = True
) -> ModelCard:
    """Raise a UserError if this run cannot resume from a checkpoint; return its model card.

    Network, path, prediction and weighting must be the task's, and if it `trains` all settings that decide how training
    continues, unless `task.allowed` names them. Tensors must be finite and have the shapes and dtypes of this run's:
    the fused optimizer would read beyond the end of moments that are too small.

    Args:
        contents: contents of the checkpoint.
        task: task of this run.
        where: name of the checkpoint in errors.
        trains: whether the run trains, and does not only validate.
        positioned: whether the loader of this run continues at the global batch of the checkpoint; the loader of a
            script does not.
    """
    check_ours(contents, where)
    with explained(f"{where} is damaged, or of another network", *MALFORMED):
        card = ModelCard.from_dict(contents[KEY], where)
        _check_settings(contents, card, task, where, trains)
        _check_form(contents, task, positioned)
    return card


def _check_settings(
    contents: Mapping[str, Any], card: ModelCard, task: LightningModule, where: str, trains: bool
) -> None:
    """Raise a UserError that names all differences between this run and the checkpoint's which are not allowed."""
    before = contents.get("settings") or {}
    if not (isinstance(before, dict) and is_plain(before)):
        raise ValueError("settings holds more than names and plain values")
    parts = ((part, getattr(card, part), ours) for part, ours in task.function_spec().items())
    function = [Change(*change, f"model.{change[0]}") for part in parts for change in part_differences(*part)]
    same_tensors = not function or _same_tensors(contents["state_dict"], task)
    changes = differences(before, task.settings)
    fixed = [*(change for change in changes if effect(change.name) == FORMS), *(() if same_tensors else function)]
    allowable = function if same_tensors else []
    if trains:
        known = tuple(change.flag for change in function)
        allowable += [c for c in changes if effect(c.name) == DECIDES and not allows(known, c.name)]
    refused = [change for change in allowable if not allows(task.allowed, change.flag or change.name)]
    if kind := [Change("the task", c.before, c.now, "") for c in changes if fixed and c.name == "model.class_path"]:
        raise UserError(refusal(where, kind, ()))  # its options are others: their list would fill a page
    if fixed or refused:
        raise UserError(refusal(where, fixed, refused))


def _same_tensors(stored: Any, task: LightningModule) -> bool:
    """Return whether stored weights have the form of the task's, and its alphas and betas, which are no weights."""
    ours = dict(task.state_dict())
    try:
        _check_tensors(stored, ours, "state_dict")
    except MALFORMED:
        return False
    fixed = [name for name in ours if name.endswith((".alphas", ".betas", ".scales"))]
    return all(torch.equal(stored[name], ours[name].cpu()) for name in fixed)


def other_settings(contents: Mapping[str, Any], card: ModelCard, task: LightningModule, data: ImageData) -> str:
    """Return one line with all settings that differ from the checkpoint's, empty if none does; the data are set up.

    Raises:
        UserError: a run of train.py has other data, and `task.allowed` does not name them.
    """
    found = differences(contents.get("settings") or {}, task.settings)
    # A run of commit afd6c43 stored the former fingerprint, of classes and labels alone; it resumes, too.
    if card.data_hash in (data.fingerprint, data.former_fingerprint):  # the same images, in another place
        found = [change for change in found if change.name != "data.path"]
    elif card.data_hash is not None:
        other = Change("data", f"{card.data} ({card.data_hash[:8]})", f"{data.name} ({data.fingerprint[:8]})", "")
        if task.settings and not allows(task.allowed, "data"):
            raise UserError(refusal("the checkpoint", (), [other]))
        found.append(other)
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


def _check_form(contents: Mapping[str, Any], task: LightningModule, positioned: bool) -> None:
    """Raise an error unless weights, averages and moments have the form of this run's, and all counts are there.

    A parameter that never had a gradient has no moments.
    """
    if not LIGHTNING.fullmatch(contents[VERSION]):
        raise ValueError(f"{VERSION} is {contents[VERSION]!r:.40}")
    _check_tensors(contents["state_dict"], dict(task.state_dict()), "state_dict")
    ema = contents["callbacks"].get("EMA", {})
    if shadow := average(ema, "the checkpoint"):
        _check_tensors(shadow, dict(task.net.named_parameters()), "ema")
    (optimizer,), (schedule,) = contents["optimizer_states"], contents["lr_schedulers"]
    groups = task.optim.groups(task.net, 1.0, own_parameters(task))  # settings of the stored ones are not used
    if [len(group["params"]) for group in optimizer["param_groups"]] != [len(group["params"]) for group in groups]:
        raise ValueError("its optimizer has other groups of parameters")
    ordered = [(parameter, group) for group in groups for parameter in group["params"]]
    for i, moments in optimizer["state"].items():
        _check_moments(moments, task.optim.moments(*ordered[i]), f"optimizer_states.0.state.{i}")
    counts = [contents["global_step"], contents["epoch"], contents.get("images_seen", 0), ema["updates"] if ema else 0]
    counts += [schedule["last_epoch"], _global_batches(contents) if positioned else 0]
    if not all(isinstance(count, int) and 0 <= count < MOST for count in counts):
        raise ValueError("one of its counts of steps or images is none")


def _global_batches(contents: Mapping[str, Any]) -> Any:
    """Return the number of global batches that a run has trained on, the state of its `StepLoader`."""
    return contents["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]["start"]


def _check_moments(stored: Mapping[str, Any], ours: Mapping[str, Any], where: str) -> None:
    """Raise an error unless `stored` has the tensors of `ours`, see `_check_tensors`, and values of the same types."""
    tensors = {name: value for name, value in ours.items() if isinstance(value, Tensor)}
    for name, value in ours.items():
        if name not in tensors and type(stored[name]) is not type(value):
            raise ValueError(f"{where}.{name} must be {type(value).__name__}")
    of_tensors = {name: value for name, value in stored.items() if name in tensors or name not in ours}
    _check_tensors(of_tensors, tensors, where)


def _check_tensors(stored: Mapping[str, Any], ours: Mapping[str, Tensor], where: str) -> None:
    """Raise an error unless `stored` are finite tensors with the names, shapes, dtypes and strides of `ours`."""
    if different := stored.keys() ^ ours.keys():
        raise ValueError(f"{where}.{min(different)} is missing, or too much")
    for name, expected in ours.items():
        actual, form = stored[name], (expected.shape, expected.dtype)
        fits = isinstance(actual, Tensor) and has_values(actual) and (actual.shape, actual.dtype) == form
        fits = fits and (actual.is_contiguous() or actual.stride() == expected.stride())
        if not (fits and torch.isfinite(actual).all()):
            raise ValueError(f"{where}.{name} is not finite, or not {tuple(expected.shape)} of {expected.dtype}")


def restore_counters(contents: dict[str, Any], trainer: Trainer, epoch: int, micro_batches: int) -> None:
    """Replace the counters of Lightning's loops by those of this run after the global batches of the checkpoint.

    Lightning counts micro-batches, of which a global batch may have had another number, and counts the epoch in which
    a run ends, at its last step or on a signal, as whole: the rest of it would be left out. These counters are those
    that it saves in `on_train_batch_end` of the last micro-batch.

    Args:
        contents: contents of the checkpoint, which are changed.
        trainer: trainer of this run.
        epoch: global batches of an epoch of this run; with 0 there is no place in it.
        micro_batches: micro-batches of a global batch in this run.
    """
    step, done = contents["global_step"], _global_batches(contents)
    fit, validate = trainer.fit_loop.state_dict(), trainer.validate_loop.state_dict()
    contents["loops"] = {"fit_loop": fit, "validate_loop": validate}
    fit["state_dict"] = {"combined_loader": [{"start": done}]}
    fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"] = dict.fromkeys(
        ("ready", "completed"), step
    )
    if not (done and epoch):
        return
    whole, last = divmod(done - 1, epoch)
    for counts in fit["epoch_progress"].values():
        counts.update(ready=whole + 1, started=whole + 1, processed=whole, completed=whole)
    batches = fit["epoch_loop.batch_progress"]
    batches["is_last_batch"] = last + 1 == epoch
    for name, count in (("total", done), ("current", last + 1)):
        seen = count * micro_batches
        batches[name].update(ready=seen, started=seen, processed=seen, completed=seen - 1)
    fit["epoch_loop.state_dict"] = {"_batches_that_stepped": step - 1}
