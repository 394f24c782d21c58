"""Checks of a checkpoint against the run that resumes from it: network, settings and data."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule

from uvit_decay.checkpoint.detect import KEY
from uvit_decay.checkpoint.io import ModelCard, TrainingContents, check_ours
from uvit_decay.data.classes import class_hash
from uvit_decay.data.datamodule import ImageData
from uvit_decay.runs.form import MALFORMED, check_form, check_tensors
from uvit_decay.runs.settings import (
    DECIDES,
    FORMS,
    MISSING,
    Change,
    allows,
    compare_settings,
    explain_refusal,
    resolve_class,
    tuple_to_list,
)
from uvit_decay.runtime.errors import UserError, explain
from uvit_decay.runtime.instantiate import Spec

NOT_THE_FUNCTION = ("init", "zero_init", "skip_zero_init", "checkpointing")  # network arguments that may differ


def check(
    contents: Mapping[str, Any], task: LightningModule, where: str, trains: bool = False, positioned: bool = True
) -> ModelCard:
    """Raise a UserError if this run cannot resume from a checkpoint; return its model card.

    Network, path, prediction and weighting must equal the task's. If the run trains, so must all settings that decide
    how training continues, unless `task.allowed` names them. Tensors must be finite and have the shapes and dtypes of
    this run: the fused optimizer would read beyond the end of moments that are too small.

    Args:
        contents: contents of the checkpoint.
        task: task of this run.
        where: name of the checkpoint in errors.
        trains: whether the run trains; False if it only validates.
        positioned: whether the loader of this run continues at the global batch of the checkpoint; the loader of a
            script does not.
    """
    check_ours(contents, where)
    with explain(f"{where} is damaged, or of another network", *MALFORMED):
        card = ModelCard.from_dict(contents[KEY], where)
        stored = TrainingContents.parse(contents, where)
        _check_settings(stored, card, task, where, trains)
        check_form(contents, stored, task, positioned)
    return card


def _check_settings(stored: TrainingContents, card: ModelCard, task: LightningModule, where: str, trains: bool) -> None:
    """Raise a UserError that names all differences from the checkpoint that are not allowed."""
    # 1. Differences of the function: network, path, prediction. If the stored tensors fit all the same, as with another
    #    path, --resume.allow may name them; otherwise nothing could be loaded.
    function: list[Change] = []
    for part, ours in task.function_spec().items():
        function += compare_specs(part, getattr(card, part), ours)
    changes = compare_settings(stored.settings, task.settings)
    fixed = [change for change in changes if change.effect == FORMS]
    allowable: list[Change] = []
    if not function or _has_same_tensors(stored.state_dict, task):
        allowable += function
    else:
        fixed += function
    # 2. Differences of the training, unless step 1 has them already: `model.net.dim` is both a setting and an argument
    #    of the network.
    if trains:
        known = [change.flag for change in function]
        for change in changes:
            if change.effect == DECIDES and not allows(known, change.name):
                allowable.append(change)
    refused = [change for change in allowable if not allows(task.allowed, change.flag or change.name)]
    if not (fixed or refused):
        return
    for change in changes:
        if fixed and change.name == "model.class_path":
            # A task of another class has other options, and their list would fill a page.
            task_class = Change("the task", change.before, change.now, "")
            raise UserError(explain_refusal(where, [task_class], ()))
    raise UserError(explain_refusal(where, fixed, refused))


def _has_same_tensors(stored: Any, task: LightningModule) -> bool:
    """Return whether stored weights have the form of the task's weights, and equal alphas, betas and scales."""
    try:
        ours = task.state_dict()
        check_tensors(stored, ours, "state_dict")
    except MALFORMED:
        return False
    for name, value in ours.items():
        if name.endswith((".alphas", ".betas", ".scales")) and not torch.equal(stored[name], value.cpu()):
            return False
    return True


def describe_changes(contents: Mapping[str, Any], card: ModelCard, task: LightningModule, data: ImageData) -> str:
    """Return one line with all settings that differ from the checkpoint, empty if none differs.

    Args:
        contents: contents of the checkpoint.
        card: its model card.
        task: task of this run.
        data: data of this run, set up.

    Raises:
        UserError: a run of train.py has other data, and `task.allowed` does not name them.
    """
    found = compare_settings(contents.get("settings") or {}, task.settings)
    if has_images(card, data):  # perhaps in another place
        found = [change for change in found if change.name != "data.path"]
    elif card.data_hash is not None:
        before = f"{card.data} ({card.data_hash[:8]})"
        now = f"{data.name} ({data.fingerprint[:8]})"
        other = Change("data", before, now, "")
        if task.settings and not allows(task.allowed, "data"):
            raise UserError(explain_refusal("the checkpoint", (), [other]))
        found.append(other)
    return ", ".join(map(str, found))


def has_images(card: ModelCard, data: ImageData) -> bool:
    """Return whether the data, set up, have the training images of a checkpoint; False if it does not tell."""
    return card.data_hash == data.fingerprint


def check_data(card: ModelCard, data: ImageData, conditional: bool, allowed: Sequence[str] = ()) -> None:
    """Raise a UserError if classes, autoencoder or latent scale of the data differ from the checkpoint's.

    Args:
        card: model card of the checkpoint.
        data: data of this run, set up.
        conditional: whether the network uses classes, so that they are compared.
        allowed: entries of --resume.allow.
    """
    ours = class_hash(data.class_names)
    if conditional and card.class_hash not in (None, ours) and not allows(allowed, "data.classes"):
        classes = f"classes of sha256 {card.class_hash[:12]}, {data.name} has {ours[:12]}"
        raise UserError(f"the checkpoint was trained on {classes}")
    if (card.latents is None) != (data.latents is None):
        before, now = ("latents", "pixels") if card.latents else ("pixels", "latents")
        raise UserError(f"the checkpoint was trained on {before}, {data.name} has {now}")
    if card.latents:
        card.latents.check_same(data.latents, "the checkpoint", data.name)


def compare_specs(part: str, stored: Spec | str | None, ours: Spec | str) -> Iterator[Change]:
    """Yield the differences in a part of the function, such as `net`: of its class, or of its arguments.

    Arguments that are not given have the defaults of the class. A part that older files lack, None, is not compared.
    """
    if not (isinstance(stored, Spec) and isinstance(ours, Spec)):
        if stored is not None and stored != ours:
            yield _change_function(part, stored, ours)
        return
    kind = resolve_class(ours.class_path)
    if resolve_class(stored.class_path) != kind:
        yield _change_function(part, stored.class_path, ours.class_path)
        return
    defaults = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
    before = {**defaults, **stored.init_args}
    now = {**defaults, **ours.init_args}
    for name in before | now:
        if name in NOT_THE_FUNCTION:
            continue
        value = tuple_to_list(before.get(name, MISSING))
        expected = tuple_to_list(now.get(name, MISSING))
        if value != expected:
            yield _change_function(f"{part}.{name}", value, expected)


def _change_function(name: str, before: Any, now: Any) -> Change:
    return Change(name, before, now, flag=f"model.{name}")
