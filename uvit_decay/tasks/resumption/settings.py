"""The settings of two runs, by flag: which differ, and which of them decide how a resumed run trains."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from uvit_decay.runtime.validation import flat
from uvit_decay.tasks.optimization import IN_PLACE

Settings = Mapping[str, Any]  # values by flag without dashes: {"model.optim.lr": 1e-4}

MISSING = "nothing"
ALL = "all"  # in --resume.allow
FORMS, DECIDES = "forms the state of the optimizer", "decides how a run trains"  # not its length and devices
BEGINS, FREE = "decides how it begins", "changes no weight"
EFFECTS = {  # of a flag and all below it, unless a longer name says otherwise
    **dict.fromkeys(("seed_everything", "model", "data"), DECIDES),
    **dict.fromkeys(("model.compile", "model.sampling", "model.net.checkpointing"), FREE),
    **dict.fromkeys(
        (f"data.{name}" for name in ("path", "test_path", "test_split", "download", "num_workers", "memory_gb")), FREE
    ),
    **dict.fromkeys((f"data.{name}" for name in ("device_batch_size", "verify", "test_crop")), FREE),
    **dict.fromkeys((f"model.optim.{name}" for name in ("optimizer", "decay_on", "layer_decay")), FORMS),
    **dict.fromkeys(("model.optim.rate_over_gain", "model.frozen"), FORMS),
    "model.init_from": BEGINS,
    **dict.fromkeys((f"model.net.{name}" for name in ("init", "zero_init", "skip_zero_init")), BEGINS),
    "trainer": FREE,  # precision is a matter of the devices, as the order of sums is
    **dict.fromkeys((f"trainer.gradient_clip_{name}" for name in ("val", "algorithm")), DECIDES),
    **dict.fromkeys(("trainer.limit_train_batches", "trainer.sync_batchnorm", "trainer.callbacks.EMA"), DECIDES),
}


def effect(name: str) -> str:
    """Return what a setting does to a run, by the longest name in EFFECTS that it begins with."""
    while name and name not in EFFECTS:
        name = name.rpartition(".")[0]
    return EFFECTS.get(name, FREE)


def _in_force(settings: Settings) -> Settings:
    """Return settings with those of the optimizer that are in force."""
    settings = dict(settings)
    for name, (other, default) in IN_PLACE.items():
        flag = f"model.optim.{name}"
        if settings.get(f"model.optim.{other}") is None and settings.get(flag, default) is None:
            settings[flag] = default
    return settings


def allows(allowed: Sequence[str], name: str) -> bool:
    """Return whether --resume.allow names a setting, a group that it is in, or all of them."""
    return any(entry == ALL or name == entry or name.startswith(f"{entry}.") for entry in allowed)


def same_run(before: Settings, now: Settings, allowed: Sequence[str] = ()) -> bool:
    """Return whether two runs have equal settings, apart from those that are `allowed` or change no weight."""
    return all(effect(change.name) == FREE or allows(allowed, change.name) for change in differences(before, now))


@dataclass(frozen=True)
class Change:
    """A setting of which a resumed run has another value, `now`, than its checkpoint.

    `flag` is that which sets it, None if it is called as the setting is, empty if there is none.
    """

    name: str
    before: Any
    now: Any
    flag: str | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.now} (was {self.before})"


def differences(before: Settings, now: Settings) -> list[Change]:
    """Return the settings that differ; an option that the older run did not know had its default.

    Without settings, as in runs that another program than train.py started, there is nothing to compare.
    """
    if not (before and now):
        return []
    before, now = _in_force({**dict(_defaults(before, now)), **before}), _in_force(now)
    pairs = {name: (before.get(name, MISSING), now.get(name, MISSING)) for name in {**before, **now}}
    return [Change(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]


def _defaults(before: Settings, now: Settings) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of all arguments of classes that both runs have."""
    for name, path in now.items():
        owner = name.removesuffix(".class_path")
        if owner != name and before.get(name) == path and isinstance(named_class(path), type):
            for argument, parameter in inspect.signature(named_class(path)).parameters.items():
                value = parameter.default
                value = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
                yield from ((flag, plain(leaf)) for flag, leaf in flat(value, f"{owner}.{argument}") if flag in now)


def named_class(class_path: str) -> Any:
    """Return the class that an imported module has under this path, its own or a re-export; without one the path."""
    module, _, name = class_path.rpartition(".")
    return getattr(sys.modules.get(module), name, class_path)


def plain(value: Any) -> Any:
    """Return a tuple as the list that YAML makes of it, and anything else as it is."""
    return list(value) if isinstance(value, tuple) else value


def refusal(where: str, fixed: Sequence[Change], allowable: Sequence[Change]) -> str:
    """Return one line that refuses to resume from `where`: what must be equal, and what --resume.allow may allow."""
    parts = []
    for change in (*fixed, *allowable):
        flag = change.name if change.flag is None else change.flag
        hint = f": set --{flag} {change.before}" if flag and change.before != MISSING else ""
        parts.append(f"{change.name} {change.before}, this run has {change.now}{hint}")
    names = ",".join(change.flag or change.name for change in allowable)
    hint = f"; --resume.allow '[{names}]' resumes with what this run has" if allowable else ""
    return f"{where} was trained with {'; '.join(parts)}{hint}"
