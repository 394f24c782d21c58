"""Conversion of objects to plain values, class path and constructor arguments, and back, for checkpoints."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from uvit_decay.files.validation import as_type
from uvit_decay.terminal.errors import UserError, explain

# Modules whose classes are elsewhere since commit ac8466d5: files may name them by these paths -> where they are now.
FORMER = {
    "uvit_decay.callbacks.generation": "uvit_decay.callbacks",
    "uvit_decay.callbacks.summary": "uvit_decay.callbacks",
    "uvit_decay.evaluation": "uvit_decay.encoders",
    "uvit_decay.metrics": "uvit_decay.encoders",
    "uvit_decay.data.latents": "uvit_decay.data",
    "uvit_decay.data.latents.module": "uvit_decay.data",
    "uvit_decay.latents": "uvit_decay.data",  # a run of --data Latents has this path in its configuration
}
# Arguments in configurations of ac8466d5 that are gone, and those that may no longer be null: class -> arguments.
GONE = {"uvit_decay.metrics.SmallClassifier": ("steps",)}
NOT_NULL = {
    "uvit_decay.callbacks.GenerationMetrics": ("num", "max_reference"),
    "uvit_decay.callbacks.LinearProbes": ("max_train",),
}


def current_path(class_path: str) -> str:
    """Return the path that a class has today, given its path in a file of this or of an earlier version."""
    module, _, name = class_path.rpartition(".")
    return f"{FORMER[module]}.{name}" if module in FORMER else class_path


class Trusted(str):
    """The name of a module or a class from elsewhere, by --trust: found in the working folder, too, and imported.

    So a module registers its metrics, extractors and data sets before other options name them.
    """

    def __new__(cls, name: str) -> Trusted:
        if str(Path.cwd()) not in sys.path:  # which begins with the folder of the script
            sys.path.append(str(Path.cwd()))
        kinds = (ImportError, AttributeError, ValueError, SyntaxError, SystemExit)  # the module may call sys.exit
        with explain(f"--trust {name} cannot be imported", *kinds):
            pkgutil.resolve_name(name)
        return super().__new__(cls, name)


@dataclass(frozen=True)
class Spec:
    """An object as plain values: the full path of its class, and its constructor arguments."""

    class_path: str
    init_args: dict[str, object]

    @classmethod
    def of(cls, kind: type, init_args: Mapping[str, Any]) -> Spec:
        """Return the description of an object of class `kind` that was built with `init_args`."""
        return cls(f"{kind.__module__}.{kind.__qualname__}", dict(init_args))

    def is_from(self, package: str) -> bool:
        """Return whether the class is defined in this package."""
        return current_path(self.class_path).startswith(f"{package}.")


def check_arguments(spec: Spec, home: str, where: Path | str) -> dict[str, Any]:
    """Return the constructor arguments of an object; raise a UserError unless they have the annotated types.

    Args:
        spec: class path and arguments; the arguments of a class from elsewhere are returned as they are.
        home: package of the classes whose arguments are checked.
        where: name of the file in errors.
    """
    checked = dict(spec.init_args)
    if not spec.is_from(home):
        return checked
    hints = get_type_hints(pkgutil.resolve_name(spec.class_path).__init__)
    for key, value in spec.init_args.items():
        if key in hints:
            checked[key] = as_type(hints[key], value, f"{where}: {spec.class_path}: {key}")
    return checked


def build(spec: Spec, base: type, home: str, trusted: Sequence[str] = (), where: Path | str = "the checkpoint") -> Any:
    """Build the object that a checkpoint or a configuration describes.

    Args:
        spec: class path and arguments.
        base: required base class.
        home: package whose classes may be built; their arguments must have the annotated types.
        trusted: names of further classes that may be built, or of modules whose classes may all be built.
        where: name of the file in errors.
    """
    spec = Spec(current_path(spec.class_path), spec.init_args)
    kind = find_class(spec.class_path, base, home, trusted, where)
    checked = check_arguments(spec, home, where)
    # Any error is possible: of another version's arguments, or of a constructor that does not check these.
    with explain(f"{where} describes a {spec.class_path} that cannot be built", Exception):
        return kind(**checked)


def find_class(name: str, base: type, home: str, trusted: Sequence[str] = (), where: Path | str = "") -> type:
    """Return a class by its path; it must be trusted, and a subclass of `base`. The arguments are those of `build`."""
    allowed = False
    for other in (home, *trusted):
        allowed = allowed or name == other or name.startswith(f"{other}.")
    if not allowed:
        raise UserError(
            f"{where} names {name}, which is not part of uvit_decay: to allow it, add --trust {name}, or in Python "
            f"trusted=[{name!r}]"
        )
    module, _, attribute = name.rpartition(".")
    with explain(f"{where} names {name}, which cannot be imported", ImportError, AttributeError, ValueError):
        kind = getattr(importlib.import_module(module), attribute)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise UserError(f"{where} names {name}, which is not a {base.__name__}")
    return kind
