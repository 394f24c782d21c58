"""The errors of jsonargparse in our words: one line that names the flag, its value, and probably the right one."""

from __future__ import annotations

import inspect
import re
from argparse import Action
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args, get_origin

from uvit_decay.terminal.suggestions import did_you_mean

NAMEABLE = ("uvit_decay", "lightning", "torch.nn", "torch.optim")  # packages that a configuration may name
PRECISIONS = "32-true, bf16-mixed or, on CUDA GPUs, 16-mixed"
# In the words of jsonargparse, or of the parser of a class within the model.
DENIED = re.compile(r"(?:Importing '|to allow )([\w.]+)(?:' is not allowed|, add --trust)")
UNKNOWN = re.compile(
    r"unrecognized arguments: ([^\s=]+)|Option '([^']+)' is not accepted|"
    r"Group '([^']+)' does not accept option '([^']+)'"
)
KEY = re.compile(r'Parser key "([\w.]+)":')
NESTED = re.compile(r"NestedArg\(key='([\w.]+)'")  # the rest of a flag, after the key
INNER = re.compile(r"^ *- ((?:unknown option )?--([\w.]+).*)", re.MULTILINE)  # a line of ours, with the flag it names
SUGGESTED = re.compile(r"(?<=did you mean )--|(?<= or )--(?=[\w.]+\?)")
CLASS = re.compile(  # a class that is not there, or none
    r"Expected a dot import path string: (\w+)$|Expected a path but (\w+) either|"
    r"module '[\w.]+' has no attribute '(\w+)'|Expected an instantiatable class, but [\w.]+ is abstract",
    re.MULTILINE,
)
EXPECTED = re.compile(r"Expected an? (?:<class '([\w.]+)'>|typing\.Literal\[(.*)\])")
VALUE = re.compile(r"(?:Given|Got) value: ([^\s({\[]+)$", re.MULTILINE)  # one word
SEED = re.compile(r"--(model|data)\.seed\b")  # both are set by --seed_everything


def describe_error(message: str, flags: Sequence[str], actions: Sequence[Action], common: Iterable[str]) -> str:
    """Return an error of a parser as one line in our words.

    For a nested option the parsers of its classes report the error one after another: the flag of an inner one is
    extended by the key of the outer one.

    Args:
        message: the parser's message.
        flags: the parser's flags.
        actions: the parser's options.
        common: further flags, of nested classes, that a user may have meant.
    """
    denied = DENIED.search(message)
    if denied:
        known = f"{', '.join(NAMEABLE[:-1])} and {NAMEABLE[-1]}"
        return f"configurations may name only classes of {known}; to allow {denied[1]}, add --trust {denied[1]}"
    unknown = UNKNOWN.match(message)
    if unknown:
        word = unknown[1] or f"--{unknown[2]}"
        if unknown[3]:
            word = f"--{unknown[3]}.{unknown[4]}"
        known_flags = dict.fromkeys([*flags, *common])
        return f"unknown option {word}{did_you_mean(word, known_flags)}"
    key_match = KEY.match(message)
    if key_match is None:
        return message
    key = key_match[1]
    inner = INNER.search(message)
    if inner:
        return _extend_flag(key, inner[1], inner[2], message)
    if key == "trainer.precision":
        return f"--{key} takes {PRECISIONS}, got {_find_value(message)}"
    bases: list[type] = []
    for action in actions:
        if action.dest == key:
            bases += _find_bases(action)
    missing = CLASS.search(message)
    if missing and bases:
        return f"--{key}: {_describe_class_error(missing[1] or missing[2] or missing[3], bases)}"
    return f"--{key}: {_describe_value_error(message, message[key_match.end() :])}"


def _extend_flag(key: str, line: str, name: str, message: str) -> str:
    """Return a line of an inner parser with the flag of the outer one: its `key` before the inner `name`.

    A flag such as --model.net.dim is parsed as `net.dim`, the nested name, by the parser of the model's class. In a
    configuration, or in a flag with all settings of the network, the network is found in the value.
    """
    prefix = f"--{key}."
    nested = NESTED.search(message)
    owner = re.search(rf"'(\w+)': {{'class_path': '[\w.]+', 'init_args': {{[^{{}}]*'{name}':", message)
    if nested and nested[1].endswith(name):
        prefix += nested[1].removesuffix(name)
    elif owner:
        prefix += f"{owner[1]}."
    elif nested and not name.startswith(f"{nested[1]}."):
        prefix += f"{nested[1]}."
    line = SUGGESTED.sub(prefix, line.replace(f"--{name}", f"{prefix}{name}", 1))
    return SEED.sub("--seed_everything", line)


def _describe_value_error(message: str, rest: str) -> str:
    """Return which types or choices are expected, and the value; a message without them as one line.

    Args:
        message: the parser's message.
        rest: the message after its key.
    """
    expected = []
    choices = []
    for kind, words in EXPECTED.findall(message):
        choices += [word.strip("'") for word in words.split(", ") if word]
        if kind not in ("", "NoneType"):
            expected.append(kind.rpartition(".")[2])
    if choices:
        expected = [f"one of {', '.join(choices)}"]
    if not expected:
        return " ".join(rest.split())
    value = _find_value(message)
    return f"expected {' or '.join(expected)}, got {value}{did_you_mean(value, choices)}"


def _find_value(message: str) -> str:
    """Return the value that a message quotes, if it is one word."""
    found = VALUE.search(message)
    return found[1] if found else "another value"


def _describe_class_error(name: str | None, bases: Sequence[type]) -> str:
    """Return the reason that no class has this name, with the class that was probably meant or all known ones.

    Without a name, as of settings whose class is not given, the class would be an abstract one.
    """
    names: set[str] = set()
    for base in bases:
        names.update(kind.__name__ for kind in _find_concrete(base))
    known = ", ".join(sorted(names))
    if name is None:
        return f"the class is missing, or abstract: name one of {known} first"
    return f"no class {name}{did_you_mean(name, names) or f'; classes are {known}'}"


def _find_bases(action: Action) -> Iterator[type]:
    """Yield the base classes of the objects that an option takes."""
    waiting: list[Any] = [getattr(action, "_typehint", None)]  # of jsonargparse; None for plain options
    while waiting:
        hint = waiting.pop()
        if get_origin(hint) is type:  # the option takes the class, as a schedule takes connections
            continue
        if inspect.isclass(hint) and hint.__module__ != "builtins" and not get_args(hint):
            yield hint
        waiting += get_args(hint)


def _find_concrete(base: type) -> Iterator[type]:
    """Yield `base` and its subclasses that are public and not abstract."""
    if not inspect.isabstract(base) and not base.__name__.startswith("_"):
        yield base
    for kind in base.__subclasses__():
        yield from _find_concrete(kind)
