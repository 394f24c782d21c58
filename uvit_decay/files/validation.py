"""Reading plain values of JSON and YAML files, whose types are checked."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from uvit_decay.files.writing import PAGE, check_content, check_is_file, replacing
from uvit_decay.terminal.errors import UserError, check_choice, explain

# PyYAML's own loader reads the same values as libyaml's, which some builds lack, and takes 20 times as long.
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_text(path: Path, most: int) -> str:
    """Return the text of a regular file of at most `most` bytes; raise a UserError if there is none."""
    check_is_file(path)
    with explain(f"cannot read {path}", OSError, UnicodeDecodeError):
        if path.stat().st_size > most:
            raise UserError(f"cannot read {path}: larger than {most >> 20} MiB, so it is another kind of file")
        return path.read_bytes().decode()


def read_json(path: Path, kind: Any) -> Any:
    """Return the contents of a JSON file as `kind`, see `as_type`; raise a UserError if it is damaged or misfits."""
    text = read_text(path, 2**24)
    check_content(path, text[:PAGE].encode())
    return as_type(kind, parse(text, path), str(path))


def write_json(path: Path, value: Any) -> None:
    """Write plain values as JSON; the file replaces `path` when it is complete."""
    text = json.dumps(value, indent=2) + "\n"
    with replacing(path) as file:
        file.write(text.encode())


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; raise a UserError if it holds none."""
    settings = parse(read_text(path, 2**20), path, lambda text: yaml.load(text, YAML_LOADER))
    return as_type(dict[str, object], settings, str(path))


def parse(text: str, source: Path | str, load: Callable[[str], Any] = json.loads) -> Any:
    """Return the values that `load` parses from `text`; raise a UserError that names `source` if it fails."""
    with explain(f"cannot read {source}", ValueError, RecursionError, yaml.YAMLError):
        return load(text)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of all values in nested dicts; a list of classes counts as a dict by class name.

    `init_args` is left out of the names, as on the command line.
    """
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        value = _by_class(value)
    if isinstance(value, dict) and value:
        for key, item in value.items():
            inner = name if key == "init_args" else f"{name}.{key}".lstrip(".")
            yield from flat(item, inner)
    else:
        yield name, value


def _by_class(items: list[Any]) -> dict[str, Any]:
    """Return the items of a list by the names of their classes, or else by their places."""
    named: dict[str, Any] = {}
    for i, item in enumerate(items):
        key = str(i)
        if isinstance(item, dict) and "class_path" in item:
            key = str(item["class_path"]).rpartition(".")[2]
        if key in named:
            key += str(i)
        named[key] = item
    return named


def as_type(kind: Any, value: Any, where: str) -> Any:
    """Return `value` as `kind`, or raise a UserError: its type must match exactly, and numbers must be finite.

    Args:
        kind: a dataclass, bool, int, float, str or a subclass of it, which checks text, object (anything), `Literal`,
            `X | Y | None`, or tuple[X, ...], tuple[X, X], Sequence[X] or dict[str, X] of these; type[X], a subclass of
            X or its name in a module that is imported already; or another class, of which `value` is an instance.
        value: a value of JSON, YAML or a pickle of plain values.
        where: name of the value in errors.
    """
    origin = get_origin(kind)
    args = get_args(kind)
    if is_dataclass(kind):
        return _dataclass(kind, as_type(dict[str, object], value, where), where)
    if origin in (Union, UnionType):
        if value is None and NoneType in args:
            return None
        kinds = [arg for arg in args if arg is not NoneType]
        for other in kinds[1:]:
            with suppress(UserError):
                return as_type(other, value, where)
        return as_type(kinds[0], value, where)
    if origin is type:
        found = value
        if isinstance(value, str):
            module, _, name = value.rpartition(".")
            found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and issubclass(found, args[0]):
            return found
    if origin is dict and isinstance(value, dict):
        return {as_type(str, key, where): as_type(args[1], item, f"{where}: {key}") for key, item in value.items()}
    is_list = origin not in (None, dict, Literal) and isinstance(value, list | tuple)
    if is_list and (origin is not tuple or ... in args or len(value) == len(args)):
        return tuple(as_type(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    return _plain(kind, value, where)


def _plain(kind: Any, value: Any, where: str) -> Any:
    """Return a single value as `kind`, which is a class or a `Literal`; arguments as of `as_type`."""
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if isinstance(kind, type) and issubclass(kind, str) and type(value) is str:
        value = kind(value)
    choices: tuple[Any, ...] = ()
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        fits = any(type(value) is type(choice) and value == choice for choice in choices)
    else:
        fits = kind is object or (get_origin(kind) is None and type(value) is kind)
    is_bounded = True
    if kind is float and fits:
        is_bounded = math.isfinite(value)
    elif kind is int and fits:
        is_bounded = abs(value) < 2**63
    if not (fits and is_bounded):
        expected = " or ".join(map(str, choices)) if choices else getattr(kind, "__name__", str(kind))
        shown = f"{str(value)[:60]!r} " if isinstance(value, str | int | float) else ""
        raise UserError(f"{where} must be {expected}, got {shown}({type(value).__name__})")
    return value


def _dataclass(kind: type, values: dict[str, Any], where: str) -> Any:
    """Return a dataclass with these values; raise a UserError if a required field is missing or a field is unknown."""
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}
    lacking = []
    for name, field in known.items():
        is_required = field.default is MISSING and field.default_factory is MISSING
        if is_required and name not in values:
            lacking.append(name)
    advice = "it is damaged or of another version of this project"
    if lacking:
        raise UserError(f"{where} lacks {min(lacking)}: {advice}")
    unknown = values.keys() - known.keys()
    if unknown:
        raise UserError(f"{where} has the unknown field {min(unknown)}: {advice}")
    checked = {name: as_type(hints[name], value, f"{where}: {name}") for name, value in values.items()}
    return kind(**checked)


def check_compile(compile: bool | str, *others: str) -> None:
    """Raise a UserError unless `compile` is a bool, the name of a backend of torch.compile, or one of `others`."""
    if isinstance(compile, bool) or compile in others:  # listing the backends imports them, for seconds
        return
    import torch

    backends = torch.compiler.list_backends(exclude_tags=())
    check_choice(("true", "false", *others, *backends), compile=compile)
