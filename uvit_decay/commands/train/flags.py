"""The flags of train.py for the arguments that errors name: `holdout` of a data module is --data.holdout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """An argument in a configuration: its name, its flag, and the class that takes it; empty for a plain section."""

    name: str
    flag: str
    owner: str


def find_flag(config: Mapping[str, Any], name: str, frames: Sequence[FrameType]) -> str | None:
    """Return the flag of the argument `name`; None if the configuration has no such argument, or several.

    Of several arguments of this name, a message means the one of the innermost object whose method wrote it, or the one
    outside the callbacks.

    Args:
        config: the configuration as nested dicts.
        name: the argument's name in Python, or its whole name such as model.net.dim.
        frames: the calls that led to the message, the innermost first.
    """
    found = [setting for setting in list_settings(config) if name in (setting.name, setting.flag.removeprefix("--"))]
    if len({setting.flag for setting in found}) == 1:
        return found[0].flag
    for frame in frames:
        classes = {kind.__name__ for kind in type(frame.f_locals.get("self")).__mro__}
        for setting in found:
            if setting.owner in classes:
                return setting.flag
    outside = {setting.flag for setting in found if not setting.flag.startswith("--trainer.callbacks.")}
    return outside.pop() if len(outside) == 1 else None


def list_settings(value: Any, flag: str = "--", owner: str = "") -> Iterator[Setting]:
    """Yield the settings in a configuration; the classes in a list, such as callbacks, share the flag of the list."""
    if isinstance(value, list):
        for item in value:
            yield from list_settings(item, flag, owner)
    elif isinstance(value, Mapping) and "class_path" in value:
        yield from list_settings(value.get("init_args"), flag, value["class_path"].rpartition(".")[2])
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            inner_flag = f"--{name}" if flag == "--" else f"{flag}.{name}"
            yield Setting(name, inner_flag, owner)
            yield from list_settings(inner, inner_flag)
