"""Conversion of objects to plain values, class path and constructor arguments, and back, for checkpoints."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.program import localised
from uvit_decay.runtime.validation import typed

MOVED = {  # older modules or classes -> where they are now; checkpoints, configurations and flags name classes
    "uvit_decay.callbacks.logger": "uvit_decay.callbacks.run_log",
    "uvit_decay.callbacks.preview": "uvit_decay.callbacks.previews",
    "uvit_decay.callbacks.reconstruction": "uvit_decay.callbacks.previews",
    "uvit_decay.callbacks.summary": "uvit_decay.callbacks.run_log",
    "uvit_decay.callbacks.threads": "uvit_decay.callbacks.run_log",
    "uvit_decay.data.base": "uvit_decay.data.datamodule",
    "uvit_decay.data.images": "uvit_decay.data.folder",
    "uvit_decay.diffusion.generate": "uvit_decay.diffusion.sampling",
    "uvit_decay.diffusion.path": "uvit_decay.diffusion.noise_path",
    "uvit_decay.tasks.mixing": "uvit_decay.tasks.classify",
    "uvit_decay.metrics.features": "uvit_decay.metrics.extractors",
}
DROPPED = {  # names of classes and options that are gone -> what to do without them
    "CustomExtractor": "for a network of your own an Extractor of ten lines does it: docs/extending.md",
    "Rollback": "lower --model.optim.lr, or resume from an earlier checkpoint",
    "skip_non_finite": "a loss that is not finite stops the run, which can resume from its last checkpoint",
    "extra_decays": "the callback EMA keeps one average: leave it out",
    "keep_weights_only": "uvit-decay export makes weights alone of a checkpoint that is kept",
}
# Options that are gone, and the defaults with which older configurations and checkpoints have them.
UNUSED = {"skip_non_finite": 0, "extra_decays": [], "keep_weights_only": False}


def renamed(values: Any) -> Any:
    """Return plain values, nested in dicts and lists, with older class paths replaced by those of MOVED.

    A class path may follow a flag, as in "--model.path=uvit_decay.diffusion.path.VP". One of DROPPED is a UserError.
    """
    if isinstance(values, dict):
        return {key: renamed(value) for key, value in values.items()}
    if isinstance(values, list):
        return [renamed(value) for value in values]
    if not isinstance(values, str):
        return values
    flag, equals, path = values.rpartition("=")
    module, dot, name = path.rpartition(".")
    if name in DROPPED and module.startswith("uvit_decay"):
        raise UserError(f"{path} is no longer part of uvit_decay: {DROPPED[name]}")
    return flag + equals + MOVED.get(path, MOVED.get(module, module) + dot + name)


class Trusted(str):
    """The name of a module or a class from elsewhere, by --trust: found in the working folder, too, and imported.

    So a module registers its metrics, extractors and data sets before other options name them.
    """

    def __new__(cls, name: str) -> Trusted:
        if str(Path.cwd()) not in sys.path:  # which begins with the folder of the script
            sys.path.append(str(Path.cwd()))
        with explained(f"--trust {name} cannot be imported", ImportError, AttributeError, ValueError):
            pkgutil.resolve_name(name)
        return super().__new__(cls, name)


@dataclass(frozen=True)
class Spec:
    """An object as plain values: the full path of its class, where it is now, and its constructor arguments."""

    class_path: str
    init_args: dict[str, object]

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_path", renamed(self.class_path))

    @classmethod
    def of(cls, kind: type, init_args: Mapping[str, Any]) -> Spec:
        """Return the description of an object of class `kind` that was built with `init_args`."""
        return cls(f"{kind.__module__}.{kind.__qualname__}", dict(init_args))

    def is_from(self, package: str) -> bool:
        """Return whether the class is defined in this package."""
        return self.class_path.startswith(f"{package}.")


def build(spec: Spec, base: type, home: str, trusted: Sequence[str] = (), where: Path | str = "the checkpoint") -> Any:
    """Build the object that a checkpoint or a configuration describes.

    Args:
        spec: class path and arguments.
        base: required base class.
        home: package whose classes may be built; their arguments must have the annotated types.
        trusted: classes from elsewhere, or modules with all of theirs, that are allowed, too.
        where: name of the file in errors.
    """
    name = spec.class_path
    if not (spec.is_from(home) or any(name == other or spec.is_from(other) for other in trusted)):
        allowing = localised("sample.py --trust")
        raise UserError(f"{where} names {name}, which is not part of uvit_decay: {allowing} {name} allows it")
    module, _, attribute = name.rpartition(".")
    with explained(f"{where} names {name}, which cannot be imported", ImportError, AttributeError, ValueError):
        kind = getattr(importlib.import_module(module), attribute)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise UserError(f"{where} names {name}, which is no {base.__name__}")
    hints = get_type_hints(kind.__init__) if spec.is_from(home) else {}
    checked = {
        key: typed(hints[key], value, f"{where}: {name}: {key}") if key in hints else value
        for key, value in spec.init_args.items()
    }
    # Any error is possible: of another version's arguments, or of a constructor that does not check these.
    with explained(f"{where} describes a {name} that cannot be built", Exception):
        return kind(**checked)
