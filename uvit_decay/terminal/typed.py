"""The public door: annotations are the contract of arguments, types by beartype and ranges by `Bounds` and `Within`.

Arguments that have an effect only with certain values of others are listed by `Needs`.

    @check_types
    def train(steps: Annotated[int, Bounds(1)], dropout: Annotated[float, Within("[0, 1)")] = 0.0) -> None: ...

`check_types` decorates public functions, constructors and dataclasses of options, but neither `forward` nor functions
of inner loops. A choice is a `Literal`; a name of a table that users extend is a str, which `check_choice` checks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, wraps
from inspect import BoundArguments, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from uvit_decay.terminal.errors import MOST_SEED, UserError, check_numbers, check_whole

Public = TypeVar("Public", bound=Callable[..., Any])
PARAMETER = re.compile(r"^\w+ [\w.<>]*?(\w+)(?:\.__init__)?\(\) parameter (\w+)=")  # the beginning of its messages


@dataclass(frozen=True)
class Bounds:
    """Least and largest value of a whole number."""

    least: int
    most: int = 2**31 - 1

    def __repr__(self) -> str:
        """Return the bounds as the help of train.py shows them."""
        return f"{self.least} to {self.most}"

    def check(self, name: str, number: Any) -> None:
        check_whole(self.least, self.most, **{name: number})


@dataclass(frozen=True)
class Within:
    """Interval of a number, such as "[0, 1)"."""

    interval: str

    def __repr__(self) -> str:
        return self.interval

    def check(self, name: str, number: Any) -> None:
        check_numbers(self.interval, **{name: number})


class Needs:
    """The condition under which an argument has an effect: the value of another one; otherwise it keeps its default.

    A class or dataclass that `check_types` decorates lists them as NEEDS = {"cooldown": Needs("schedule", "wsd")}, or
    several of an argument. Of a tuple of values, one must fulfil it.

    Args:
        other: the other argument.
        values: its values with which the argument has an effect; by default all that are not in `unless`.
        unless: its values with which the argument has no effect.
    """

    def __init__(self, other: str, *values: object, unless: Sequence[object] = ()) -> None:
        self.other = other
        self.values = values
        self.unless = unless

    def check(self, name: str, value: object, other: object) -> None:
        """Raise a UserError if the argument `name` has no effect; `other` is the value of the other argument."""
        others = other if isinstance(other, tuple) else (other,)
        fulfilled = [each not in self.unless and (not self.values or each in self.values) for each in others]
        if not any(fulfilled):
            shown = ",".join(map(str, others))
            line = f"{value} has no effect with `{self.other}` {shown}: leave it out"
            if self.values:
                line += f", or set `{self.other}` to {' or '.join(map(str, self.values))}"
            raise UserError(line, argument=name)


Positive = Annotated[int, Bounds(1)]
Seed = Annotated[int, Bounds(0, MOST_SEED)]
Share = Annotated[float, Within("[0, 1]")]


class WrongType(UserError):
    """An argument of another type than the annotated one, in the words of beartype."""

    def __init__(self, message: str) -> None:
        whole, _, _ = message.partition(":\n*")  # what follows is a line for each type of a union
        super().__init__(PARAMETER.sub(r"\1: `\2` = ", whole))


def check_types(public: Public) -> Public:
    """Return a function, or a class with its constructor, that refuses arguments of other types and ranges.

    An int is also a float, and a str is not a sequence of str. A number of numpy is passed on as Python's, a list as a
    tuple and a str as a Path where only these are annotated. The signature stays the same. Of the items of a sequence,
    beartype checks only the first one. The UserError names the argument, the annotated type, and the value.
    """
    if not isinstance(public, type):
        return _checked(public, public)
    public.__init__ = _checked(public.__init__, public)
    return public


def _checked(call: Callable[..., Any], owner: Callable[..., Any]) -> Any:
    """Return `call` with checks; `owner` is the function itself, or the class whose constructor it is."""
    bind = signature(call).bind_partial  # a missing argument is Python's own error
    needs: Mapping[str, Needs | Sequence[Needs]] = getattr(owner, "NEEDS", {})
    hints: dict[str, Any] = {}
    typed = call

    def read_hints() -> bool:
        """Read the annotations, return whether they have changed; a module of the user may extend a table of names."""
        nonlocal hints, typed
        before, hints = hints, get_type_hints(owner if is_dataclass(owner) else call, include_extras=True)
        if hints != before:
            typed = _add_types(call, hints)
        return hints != before

    @wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not hints:
            read_hints()  # at import, annotations may name what is defined later
        try:
            given = bind(*args, **kwargs)
        except TypeError:  # too many arguments, or an unknown one: Python's own error names the function
            return call(*args, **kwargs)
        for name, value in given.arguments.items():
            given.arguments[name] = _convert(value, hints.get(name))
        check_ranges(hints, given.arguments)
        if needs:
            given.apply_defaults()
            check_needs(needs, given)
        try:
            return typed(*given.args, **given.kwargs)
        except WrongType:
            if not read_hints():
                raise
        return typed(*given.args, **given.kwargs)

    return checked


@cache
def _decorator() -> Callable[[Public], Public]:
    """Return beartype's decorator; a program that only prints its help does not import beartype."""
    from beartype import BeartypeConf, FrozenDict, beartype

    return beartype(
        conf=BeartypeConf(
            is_pep484_tower=True,  # an int is a float
            is_random=False,  # the same call is refused each time
            is_color=False,
            violation_param_type=WrongType,
            hint_overrides=FrozenDict({Sequence[str]: list[str] | tuple[str, ...]}),
        )
    )


def _add_types(call: Callable[..., Any], hints: Mapping[str, Any]) -> Callable[..., Any]:
    """Return `call` with checks of these annotations of its arguments."""
    from jaxtyping import jaxtyped

    @wraps(call, updated=())  # not the mark that beartype leaves on what it has decorated, as in the tests
    def typed(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    typed.__annotations__ = {name: hint for name, hint in hints.items() if name != "return"}
    decorated = _decorator()(typed)

    def in_own_context(*args: Any, **kwargs: Any) -> Any:
        with jaxtyped("context"):  # the sizes of tensors that checks of a caller have bound do not count
            return decorated(*args, **kwargs)

    return in_own_context


def _convert(value: Any, hint: Any) -> Any:
    """Return a value as the annotated type, where that is a matter of form."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()  # files cannot store numbers of numpy
    kinds = set(_list_kinds(hint))
    if isinstance(value, list) and tuple in kinds and not kinds & {list, Sequence}:
        return tuple(value)
    if isinstance(value, str) and Path in kinds and not kinds & {str, Literal}:
        return Path(value)
    return value


def _list_kinds(hint: Any) -> list[Any]:
    """Return the types of a union without the types of their items."""
    if get_origin(hint) in (Annotated, Union, UnionType):
        kinds = []
        for part in get_args(hint):
            kinds += _list_kinds(part)
        return kinds
    return [get_origin(hint) or hint]


def split_hint(hint: Any) -> tuple[Any, list[Any]]:
    """Return a type without `| None` and `Annotated`, and its annotations."""
    notes: list[Any] = []
    while get_origin(hint) in (Annotated, Union, UnionType):
        types = [part for part in get_args(hint) if part is not NoneType]
        hint = types[0]
        notes += types[1:]
    return hint, notes


def check_ranges(hints: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise a UserError that names the first number, or number in a tuple, outside its annotated range."""
    for name, value in values.items():
        _, notes = split_hint(hints.get(name))
        for note in notes:
            if isinstance(note, Bounds | Within):
                for number in value if isinstance(value, tuple) else [value]:
                    if isinstance(number, int | float):
                        note.check(name, number)


def check_needs(needs: Mapping[str, Needs | Sequence[Needs]], given: BoundArguments) -> None:
    """Raise a UserError that names the first argument that is not its default and has no effect."""
    for name, needed in needs.items():
        value = given.arguments[name]
        if value == given.signature.parameters[name].default:
            continue
        for need in needed if isinstance(needed, Sequence) else [needed]:
            need.check(name, value, given.arguments[need.other])
