"""Objects as plain values, their class and the arguments it was built with, and back: what checkpoints hold."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from uvit_decay.errors import UserError, one_line
from uvit_decay.plain import typed


@dataclass(frozen=True)
class Spec:
    """An object as plain values: the full name of its class, and the arguments that it was built with."""

    class_path: str
    init_args: dict[str, object]

    def is_from(self, package: str) -> bool:
        """Whether the class is one of this package."""
        return self.class_path.startswith(f"{package}.")


def spec(kind: type, init_args: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of an object of class `kind` that was built with `init_args`."""
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": dict(init_args)}


def build(spec: Spec, base: type, home: str, trusted: Sequence[str] = ()) -> Any:
    """The object that a checkpoint describes, if its class is at home in the package `home` or trusted.

    Raises:
        UserError: a class from elsewhere, one that is not there or no `base`, or arguments that it does not know, of
            other types than its own, or out of range.
    """
    name, arguments = spec.class_path, dict(spec.init_args)
    if not spec.is_from(home) and name not in trusted:
        raise UserError(
            f"the checkpoint names {name}, which is not part of uvit_decay: sample.py --trust {name} allows it"
        )
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"the checkpoint names the class {name}, which cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"the checkpoint names {name}, which is no {base.__name__}")
    kinds = get_type_hints(found.__init__) if spec.is_from(home) else {}
    for argument in arguments.keys() & kinds.keys():
        arguments[argument] = typed(kinds[argument], arguments[argument], f"the checkpoint's {name}: {argument}")
    try:
        return found(**arguments)
    except UserError:
        raise
    except TypeError as error:
        raise UserError(f"the checkpoint describes {name} as another version knew it: {one_line(error)}") from error
    except Exception as error:  # any: nobody has built it from these arguments before
        raise UserError(f"the checkpoint describes a {name} that cannot be: {one_line(error)}") from error
