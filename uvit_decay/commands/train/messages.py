"""The errors of jsonargparse in our words: one line that names the flag, its value, and probably the right one."""

from __future__ import annotations

import inspect
import pkgutil
import re
from argparse import Action
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

from uvit_decay.terminal.suggestions import did_you_mean

NAMEABLE = ("uvit_decay", "lightning", "torch.nn", "torch.optim")  # packages that a configuration may name
DENIED = re.compile(r"Importing '([\w.]+)' is not allowed")
KEY = re.compile(r'Parser key "([\w.]+)"')
NESTED = re.compile(r"NestedArg\(key='([\w.]+)'")  # the rest of a flag, after the key
# The flag at the beginning of a message of ours, and the suggested ones at its end.
OURS = re.compile(r"(?:(?<=^)|(?<=^unknown option )|(?<=did you mean )|(?<= or ))--(?=[\w.]+)")
NAME = re.compile(r"(?:unknown option )?--([\w.]+)")
UNKNOWN = re.compile(r"unrecognized arguments: (\S+)|Option '([^']+)' is not accepted")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
TAKEN = {"trainer.precision": "32-true, bf16-mixed or, on CUDA GPUs, 16-mixed"}  # instead of all of Lightning's values
UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (\w+)$|Expected a path but (\w+) either")
CHOICES = re.compile(r"Expected a typing\.Literal\[(.*?)\]")
VALUE = re.compile(r"(?:Given|Got) value: ([^\s({\[]+)$", re.MULTILINE)  # one word
ABSTRACT = re.compile(r"Expected an instantiatable class, but ([\w.]+) is abstract")
TYPE = re.compile(r"Expected an? <class '([\w.]+)'>(?:\. Got value: (.*))?$")
# Reasons of types that the value was not meant for.
FORMS = re.compile(
    r"'NoneType'|abc.Sequence'|dot import path|import path format|Given value|Not a valid subclass of|"
    r"Subclass types expect|^a class path|^a dict with|Does not validate|^Subtypes|Expected a path but|"
    r"^Errors:$|^Problem with given class_path"
)
LINKED = re.compile(r"--(model|data)\.seed\b|(?<=\")(model|data)\": \"seed(?=\")")  # both are set by --seed_everything


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
    key_match = KEY.match(message)
    if key_match is None:
        return _reword(message, flags, common)
    key = key_match[1]
    bases: list[type] = []
    for action in actions:
        if action.dest == key:
            bases += _find_bases(action)
    value = VALUE.search(message)
    given = value[1] if value else ""
    if key == "image_size" and "value type: <class 'list'>" in message:
        return f"--{key}: images are squares: give one number"
    if key in TAKEN and given:
        return f"--{key} takes {TAKEN[key]}, got {given}"
    reasons = []
    for line in message.splitlines()[1:]:
        reason = re.sub(r"^\s*(- )?", "", line)
        if reason:
            reasons.append(_reword(reason, flags, common, bases, given))
    rest = message[key_match.end() :].strip(": \n")
    if not reasons and rest:  # all in one line, as of a configuration that does not exist
        reasons.append(_reword(rest, flags, common, bases, given))
    nested_match = NESTED.search(message)
    nested = nested_match[1] if nested_match else None
    found = []
    # A list and a single value are refused for the same reason.
    for reason in dict.fromkeys(_select_reasons(reasons)):
        found.append(_add_key(reason, key, nested))
    text = " ".join(found) if nested is None else found[0]
    return LINKED.sub("--seed_everything", text)


def _select_reasons(reasons: Sequence[str]) -> Sequence[str]:
    """Return the most helpful reasons: unknown classes, otherwise reasons of types that fit the form of the value."""
    classes = [reason for reason in reasons if reason.startswith("no class")]
    if classes:
        return classes
    meant = [reason for reason in reasons if not FORMS.search(reason)]
    return meant or reasons


def _add_key(reason: str, key: str, nested: str | None) -> str:
    """Return a reason with the flag of the outer parser: the flag of `key`, followed by `nested` if that is known."""
    own = NAME.match(reason)
    if own is None:
        flag = f"--{key}.{nested}" if nested else f"--{key}"
        return f"{flag}: {reason}"
    between = ""
    if nested and nested.endswith(own[1]):
        between = nested.removesuffix(own[1])
    return OURS.sub(f"--{key}.{between}", reason)


def _reword(
    reason: str, flags: Sequence[str], common: Iterable[str], bases: Sequence[type] = (), given: str = ""
) -> str:
    """Return a reason of the parser in our words; a reason that is in our words already stays as it is.

    Args:
        reason: a line of the parser's message.
        flags: the parser's flags.
        common: further flags that a user may have meant.
        bases: base classes of the objects that the option takes.
        given: the value of the option; empty if it is not one word.
    """
    unknown = UNKNOWN.search(reason)
    if unknown and not reason.startswith("unknown option"):
        word = (unknown[1] or f"--{unknown[2]}").partition("=")[0]
        known_flags = dict.fromkeys([*flags, *common])
        return f"unknown option {word}{did_you_mean(word, known_flags)}"
    missing = UNKNOWN_CLASS.match(reason)
    if missing and bases:
        return _describe_class_error(missing[1] or missing[2], bases)
    abstract = ABSTRACT.match(reason)
    if abstract:
        classes = ", ".join(_name_classes([pkgutil.resolve_name(abstract[1])]))
        return f"its class is missing: name one first, with += or as class_path; classes are {classes}"
    choices = CHOICES.match(reason)
    if choices:
        known = [choice.strip("'") for choice in choices[1].split(", ")]
        expected = f"expected one of {', '.join(known)}"
        if not given:
            return expected
        return f"{expected}, got {given}{did_you_mean(given, known)}"
    kind = TYPE.match(reason)
    if kind:
        value = kind[2] or given
        return f"expected {kind[1]}" + (f", got {value}" if value else "")
    return reason


def _describe_class_error(name: str, bases: Sequence[type]) -> str:
    """Return the reason that no class has this name, with the class that was probably meant or all known ones."""
    known = _name_classes(bases)
    hint = did_you_mean(name, known) or f"; classes are {', '.join(known)}"
    return f"no class {name}{hint}"


def _name_classes(bases: Sequence[type]) -> list[str]:
    """Return the sorted names of the classes that may be built where objects of these `bases` are taken."""
    names: set[str] = set()
    for base in bases:
        names.update(kind.__name__ for kind in _find_concrete(base))
    return sorted(names)


def _find_bases(action: Action) -> Iterator[type]:
    """Yield the base classes of the objects that an option takes."""
    waiting: list[Any] = [getattr(action, "_typehint", None)]  # of jsonargparse; None for plain options
    while waiting:
        hint = waiting.pop()
        if inspect.isclass(hint) and hint.__module__ != "builtins" and not get_args(hint):
            yield hint
        waiting += get_args(hint)


def _find_concrete(base: type) -> Iterator[type]:
    """Yield `base` and its subclasses that are public and not abstract."""
    if not inspect.isabstract(base) and not base.__name__.startswith("_"):
        yield base
    for kind in base.__subclasses__():
        yield from _find_concrete(kind)
