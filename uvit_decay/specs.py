"""Objects as plain values, their class and the arguments it was built with, and back: what checkpoints hold."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from uvit_decay.errors import UserError, one_line


def spec(kind: type, init_args: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of an object of class `kind` that was built with `init_args`."""
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": dict(init_args)}


@contextmanager
def of_this_version(what: str) -> Iterator[None]:
    """Plain values are read into dataclasses of ours: fields that these do not know are a UserError about `what`."""
    try:
        yield
    except TypeError as error:
        raise UserError(f"{what} was written by another version of this project: {one_line(error)}") from error


def build(spec: dict[str, Any], base: type, home: str, trusted: Sequence[str]) -> Any:
    """The object that a checkpoint describes, if its class is at home in the package `home` or trusted.

    Raises:
        UserError: a class from elsewhere, one that is not there or no `base`, or arguments that it does not know.
    """
    name = spec["class_path"]
    if not name.startswith(f"{home}.") and name not in trusted:
        raise UserError(
            f"the checkpoint names {name}, which is not part of uvit_decay: sample.py --trust {name} allows it"
        )
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"the checkpoint names the class {name}, which cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"the checkpoint names {name}, which is no {base.__name__}")
    try:
        return found(**spec["init_args"])
    except TypeError as error:
        raise UserError(f"the checkpoint describes {name} as another version knew it: {one_line(error)}") from error
