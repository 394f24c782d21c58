"""Checks of a checkpoint against the run that resumes from it: network, settings and data."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from uvit_decay.checkpoint.detect import KEY
from uvit_decay.checkpoint.io import ModelCard, TrainingContents, check_ours
from uvit_decay.data.classes import class_hash
from uvit_decay.data.datamodule import ImageData
from uvit_decay.files.instantiate import Spec
from uvit_decay.runs.resumable import Resumable
from uvit_decay.runs.settings import (
    DECIDES,
    FORMS,
    MISSING,
    Change,
    allows,
    compare_settings,
    explain_refusal,
    find_effect,
    resolve_class,
    tuple_to_list,
)
from uvit_decay.terminal.errors import UserError, explain

MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)  # raised by contents of another form
MOMENTS = {"exp_avg", "exp_avg_sq", "momentum_buffer"}  # tensors of an optimizer with the shapes of the parameters
VERSION = "pytorch-lightning_version"
LIGHTNING = re.compile(r"[2-9](\.\d+)+(\.?(a|b|rc|post|dev)\d+)*")


def check(contents: Mapping[str, Any], task: Resumable, where: str, trains: bool = False) -> ModelCard:
    """Raise a UserError if this run cannot resume from a checkpoint; return its model card.

    Network, path, prediction and weighting must equal the task's. If the run trains, so must all settings that decide
    how training continues, unless `task.allowed` names them. Weights and moments must fit the task.

    Args:
        contents: contents of the checkpoint.
        task: task of this run.
        where: name of the checkpoint in errors.
        trains: whether the run trains; False if it only validates.
    """
    check_ours(contents, where)
    with explain(f"{where} is damaged, or of another network", *MALFORMED):
        card = ModelCard.from_dict(contents[KEY], where)
        stored = TrainingContents.parse(contents, where)
        misfit = _find_misfit(stored.state_dict, task.state_dict(keep_vars=True))
        _check_settings(_list_changes(stored, card, task), task, where, trains, fits=misfit is None)
        # Lightning compares this version with its own when it loads the file, and fails on other text.
        if not LIGHTNING.fullmatch(contents[VERSION]):
            raise ValueError(f"{VERSION} is {contents[VERSION]!r:.40}")
        if stored.average:
            misfit = misfit or _find_misfit(stored.average, dict(task.net.named_parameters()))
        if misfit:
            raise ValueError(misfit)
        for name, value in (stored.state_dict | stored.average).items():
            if not value.isfinite().all():
                raise ValueError(f"{name} is not finite")
        (optimizer,) = contents["optimizer_states"]
        _check_moments(optimizer, task.group_parameters(1.0))
    return card


def _find_misfit(stored: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> str | None:
    """Return the first difference in names or shapes of weights, or in alphas, betas or scales that are not learned."""
    different = stored.keys() ^ ours.keys()
    if different:
        name = min(different)
        return f"{name} is missing" if name in ours else f"{name} is not expected"
    for name, value in ours.items():
        if stored[name].shape != value.shape:
            return f"{name} has shape {tuple(stored[name].shape)}, not {tuple(value.shape)}"
        fixed = name.endswith((".alphas", ".betas", ".scales")) and not isinstance(value, nn.Parameter)
        if fixed and not torch.equal(stored[name], value.cpu()):
            return f"{name} has other values"
    return None


def _check_moments(stored: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ValueError if the state of an optimizer does not fit the parameters of this run, in their groups.

    Scripts store no settings that tell it, and a fused optimizer would read beyond the end of moments that are too
    small.
    """
    if [len(group["params"]) for group in stored["param_groups"]] != [len(group["params"]) for group in groups]:
        raise ValueError("its optimizer has other groups of parameters")
    parameters = []
    for group in groups:
        parameters += group["params"]
    for i, state in stored["state"].items():
        for name in MOMENTS & state.keys():
            if state[name].shape != parameters[i].shape:
                raise ValueError(f"{name} of parameter {i} has shape {tuple(state[name].shape)}")


def _list_changes(stored: TrainingContents, card: ModelCard, task: Resumable) -> list[Change]:
    """Return the settings that differ; if a class differs, without its arguments that do not form the optimizer.

    They are train.py's settings, or the fields of the model card if a script began or resumes the run.
    """
    if not (stored.settings and task.settings):
        changes = []
        for part, ours in task.function_spec().items():
            changes += compare_specs(part, getattr(card, part), ours)
        return changes
    changes = compare_settings(stored.settings, task.settings)
    classes = {change.name for change in changes if change.name.endswith(".class_path")}
    owners = [name.removesuffix(".class_path") for name in classes]
    found = []
    for change in changes:
        if change.name in classes or change.effect == FORMS or not allows(owners, change.name):
            found.append(change)
    return found


def _check_settings(changes: Iterable[Change], task: Resumable, where: str, trains: bool, fits: bool) -> None:
    """Raise a UserError that names all changes that are not allowed.

    Args:
        changes: differences from the checkpoint.
        task: task of this run.
        where: name of the checkpoint in errors.
        trains: whether the run trains; otherwise only the function of the network counts.
        fits: whether the weights fit all the same, as with another path; otherwise nothing could be loaded, and
            --resume.allow cannot help.
    """
    function = [f"model.{part}" for part in task.function_spec()]
    fixed = []
    refused = []
    for change in changes:
        name = change.flag or change.name
        is_function = change.effect == DECIDES and allows(function, name)
        if change.effect == FORMS or (is_function and not fits):
            fixed.append(change)
        elif allows(task.allowed, name):
            continue
        elif is_function or (trains and change.effect == DECIDES):
            refused.append(change)
    if fixed or refused:
        raise UserError(explain_refusal(where, fixed, refused))


def describe_changes(contents: Mapping[str, Any], card: ModelCard, task: Resumable, data: ImageData) -> str:
    """Return one line with all settings that differ from the checkpoint, empty if none differs.

    Args:
        contents: contents of the checkpoint.
        card: its model card.
        task: task of this run.
        data: data of this run, set up.
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
        if find_effect(f"model.{part}.{name}") != DECIDES:
            continue
        value = tuple_to_list(before.get(name, MISSING))
        expected = tuple_to_list(now.get(name, MISSING))
        if value != expected:
            yield _change_function(f"{part}.{name}", value, expected)


def _change_function(name: str, before: Any, now: Any) -> Change:
    return Change(name, before, now, flag=f"model.{name}")
