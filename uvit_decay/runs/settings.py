"""The settings of two runs, by flag: which differ, and which of them decide how a resumed run trains."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from uvit_decay.files.instantiate import current_path
from uvit_decay.files.validation import flat

Settings = Mapping[str, Any]  # values by flag without dashes: {"model.optim.lr": 1e-4}

MISSING = "nothing"
SHA256 = ".sha256"  # end of the name of a file's checksum, see uvit_decay/tasks/file_digests.py
LISTS = ("trainer.callbacks", "model.auxiliary")  # lists of classes, whose arguments have no options of their own
ALL = "all"  # in --resume.allow
FORMS = "forms the state of the optimizer"
DECIDES = "decides how a run trains"  # apart from its length and devices
BEGINS = "decides how it begins"
FREE = "changes no weight"
EFFECTS = {  # of a flag and all below it, unless a longer name says otherwise
    "seed_everything": DECIDES,
    "model": DECIDES,
    "model.compile": FREE,
    "model.sampling": FREE,
    "model.frozen": FORMS,
    "model.init_from": BEGINS,
    "model.net.checkpointing": FREE,
    "model.net.init": BEGINS,
    "model.net.zero_init": BEGINS,
    "model.net.skip_zero_init": BEGINS,
    "model.optim.optimizer": FORMS,
    "model.optim.decay_on": FORMS,
    "model.optim.layer_decay": FORMS,
    "model.optim.rate_over_gain": FORMS,
    "data": DECIDES,
    "data.path": FREE,
    "data.labels": FREE,  # the fingerprint of the images has their labels
    "data.test_path": FREE,
    "data.test_labels": FREE,
    "data.test_split": FREE,
    "data.test_crop": FREE,
    "data.files": FREE,
    "data.test_files": FREE,
    "data.download": FREE,
    "data.verify": FREE,
    "data.num_workers": FREE,
    "data.memory_gb": FREE,
    "data.skip_unreadable": FREE,  # the fingerprint of the data covers it
    "data.device_batch_size": FREE,
    "trainer": FREE,  # precision depends on the devices, like the order of sums
    "trainer.gradient_clip_val": DECIDES,
    "trainer.gradient_clip_algorithm": DECIDES,
    "trainer.limit_train_batches": DECIDES,
    "trainer.sync_batchnorm": DECIDES,
    "trainer.callbacks.EMA": DECIDES,
}


# Option of the optimizer -> the option that may be given instead, and the value of the first if neither is given.
ALTERNATIVES = {"lr": ("blr", 2e-4), "warmup_steps": ("warmup_epochs", 2500)}


def find_effect(name: str) -> str:
    """Return what a setting does to a run, by the longest name in EFFECTS that it begins with."""
    while name and name not in EFFECTS:
        name = name.rpartition(".")[0]
    return EFFECTS.get(name, FREE)


def allows(allowed: Sequence[str], name: str) -> bool:
    """Return whether --resume.allow names a setting, a group that it is in, or all of them."""
    return any(entry == ALL or name == entry or name.startswith(f"{entry}.") for entry in allowed)


def is_same_run(before: Settings, now: Settings, allowed: Sequence[str] = ()) -> bool:
    """Return whether two runs have equal settings, apart from those that are `allowed` or change no weight."""
    for change in compare_settings(before, now):
        if change.effect != FREE and not allows(allowed, change.name):
            return False
    return True


def keeps_weights(before: Settings, now: Settings) -> bool:
    """Return whether a run with the settings `now` trains on as a run with the settings `before` would have.

    Settings that decide only how a run begins may differ. Without both settings, which a script does not store, it is
    not known: False.
    """
    changes = compare_settings(before, now)
    return bool(before and now) and all(change.effect in (FREE, BEGINS) for change in changes)


@dataclass(frozen=True)
class Change:
    """A setting whose value differs between the checkpoint and the resumed run.

    Args:
        name: name of the setting, such as model.optim.lr.
        before: its value in the checkpoint.
        now: its value in this run.
        flag: the option that sets it, without dashes; None if it is `name`, empty if no option sets it.
    """

    name: str
    before: Any
    now: Any
    flag: str | None = None

    @property
    def effect(self) -> str:
        """Effect of the setting on a run."""
        return find_effect(self.flag or self.name)

    def __str__(self) -> str:
        return f"{self.name} {self.now} (was {self.before})"


def compare_settings(before: Settings, now: Settings) -> list[Change]:
    """Return the settings that differ; an option that the older run did not know had its default.

    Runs that another program than train.py started have no settings. If one of the runs has none, the list is empty.
    """
    if not (before and now):
        return []
    defaults = dict(_find_defaults(before, now))
    before = _add_optimizer_defaults({**defaults, **before})
    now = _add_optimizer_defaults(now)
    found: list[Change] = []
    for name in {**before, **now}:
        if not name.endswith(SHA256):
            found += _compare_setting(name, before, now)
    return found


def _compare_setting(name: str, before: Settings, now: Settings) -> Iterator[Change]:
    """Yield the difference in a setting, if any: in its value, or in the checksum of the file that it names.

    A file of the same checksum is the same, wherever it is.
    """
    then, value = before.get(name, MISSING), now.get(name, MISSING)
    digest = name + SHA256
    stored, ours = before.get(digest), now.get(digest)
    is_same_file = stored is not None and stored == ours
    is_same_class = _is_same_class(name, then, value)
    if then != value and not (is_same_file or is_same_class):
        yield Change(name, then, value)
    elif then == value and stored != ours:
        yield Change(digest, MISSING if stored is None else stored, MISSING if ours is None else ours, flag="")


def _is_same_class(name: str, *paths: Any) -> bool:
    """Return whether a setting is a class, and two paths name the same one, such as its former path."""
    if not name.endswith(".class_path") or not all(isinstance(path, str) for path in paths):
        return False
    one, other = map(resolve_class, paths)
    return one is other


def _add_optimizer_defaults(settings: Settings) -> Settings:
    """Return settings with the learning rate and the warm-up that apply if no flag gives them."""
    settings = dict(settings)
    for name, (other, default) in ALTERNATIVES.items():
        flag = f"model.optim.{name}"
        if settings.get(f"model.optim.{other}") is None and settings.get(flag, default) is None:
            settings[flag] = default
    return settings


def _find_defaults(before: Settings, now: Settings) -> Iterator[tuple[str, Any]]:
    """Yield flag and default of all arguments of the classes that both runs have."""
    for name, path in now.items():
        owner = name.removesuffix(".class_path")
        if owner == name or before.get(name) is None or not _is_same_class(name, before[name], path):
            continue
        kind = resolve_class(path)
        if not isinstance(kind, type):
            continue
        for argument, parameter in inspect.signature(kind).parameters.items():
            value = parameter.default
            if value is inspect.Parameter.empty:
                continue
            if dataclasses.is_dataclass(value):
                value = dataclasses.asdict(value)
            for flag, leaf in flat(value, f"{owner}.{argument}"):
                if flag in now:
                    yield flag, tuple_to_list(leaf)


def resolve_class(class_path: str) -> Any:
    """Return the class that an imported module has under this path, of today or earlier; otherwise the path."""
    module, _, name = current_path(class_path).rpartition(".")
    return getattr(sys.modules.get(module), name, class_path)


def tuple_to_list(value: Any) -> Any:
    """Return a tuple as a list, as YAML stores it, and any other value unchanged."""
    return list(value) if isinstance(value, tuple) else value


def explain_refusal(where: str, fixed: Sequence[Change], allowable: Sequence[Change]) -> str:
    """Return the message of one line that refuses to resume from a checkpoint.

    Args:
        where: name of the checkpoint.
        fixed: differences that must be undone.
        allowable: differences that must be undone or allowed by --resume.allow.
    """
    parts = []
    for change in (*fixed, *allowable):
        parts.append(f"{change.name} {change.before}, this run has {change.now}{_explain_undoing(change)}")
    message = f"{where} was trained with {'; '.join(parts)}"
    if allowable:
        names = ",".join(change.flag or change.name for change in allowable)
        message += f"; `resume.allow` '[{names}]' resumes with the values of this run"
    return message


def _explain_undoing(change: Change) -> str:
    """Return what to type to undo a change, after a colon; empty if nothing can be typed."""
    flag = change.name if change.flag is None else change.flag
    if not flag or change.before == MISSING:
        return ""
    value = change.before
    if not isinstance(value, str):
        value = json.dumps(value, default=str)  # as an option takes it: null, true, [0.9, 0.99]
    for list_name in LISTS:
        if flag.startswith(f"{list_name}."):
            kind, _, argument = flag.removeprefix(f"{list_name}.").partition(".")
            return f": give {kind} in `{list_name}` the {argument} {value}"
    return f": set `{flag.removesuffix('.class_path')}` {shlex.quote(value)}"
