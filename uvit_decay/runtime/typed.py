"""Types of arguments at the public door: the annotations are the contract, and beartype compares values with them.

`check_types` decorates public functions, constructors and dataclasses of options, but neither `forward` nor functions
of inner loops. Ranges and choices are values, which `check_numbers`, `check_whole` and `check_choice` check.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache, wraps
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from uvit_decay.runtime.errors import UserError

Public = TypeVar("Public", bound=Callable[..., Any])
MODULES = re.compile(r"\b(?:\w+\.)+(?=\w)")  # names of modules before names of types


def check_types(public: Public) -> Public:
    """Return a function, or a class with its constructor, that refuses arguments of other types than the annotated.

    An int is also a float. A number of numpy is passed on as Python's, a list as a tuple and a str as a Path where only
    these are annotated. The signature stays the same. Of the items of a sequence, beartype checks only the first one.

    Raises:
        UserError: when called, with one line that names the argument, the annotated type, and the value with its type.
    """
    if not isinstance(public, type):
        return _checked(public, public)
    public.__init__ = _checked(public.__init__, public)
    return public


def _checked(call: Callable[..., Any], owner: Callable[..., Any]) -> Any:
    """Return `call` with checks; `owner` is the function itself, or the class whose constructor it is."""
    parameters = signature(call).parameters
    bind = signature(call).bind
    hints: dict[str, Any] = {}

    def check(name: str, value: object) -> Any:
        """Return the value of an argument, converted where that is needed."""
        # Annotations are read at the first call: at import they may name what is defined later.
        if not hints:
            hints.update(_read_hints(call, owner))
        if name not in hints:
            return value
        for _ in range(2):
            for converted in _conversions(value):
                if _fits(converted, hints[name]):
                    return converted
            # A module of the user may have added a name to a table since the last call, such as a schedule.
            hints.update(_read_hints(call, owner))
        raise UserError(f"{owner.__name__}: {name} must be {_describe(hints[name])}, got {_show(value)}")

    @wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = None
        with suppress(TypeError):
            given = bind(*args, **kwargs)
        if given is None:
            return call(*args, **kwargs)  # raises Python's own error, which names the function
        for name, value in given.arguments.items():
            kind = parameters[name].kind
            if kind is Parameter.VAR_POSITIONAL:
                given.arguments[name] = tuple(check(name, item) for item in value)
            elif kind is not Parameter.VAR_KEYWORD:
                given.arguments[name] = check(name, value)
        return call(*given.args, **given.kwargs)

    return checked


def _read_hints(call: Callable[..., Any], owner: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotated types of the arguments; a dataclass may inherit them from other modules."""
    return get_type_hints(owner if is_dataclass(owner) else call)


@cache
def _tester() -> Callable[[object, Any], bool]:
    """Return the test (value, type) -> bool; a program that only prints its help does not import beartype."""
    from beartype import BeartypeConf
    from beartype.door import is_bearable
    from jaxtyping import jaxtyped

    # The tower: an int is a float. Not random: the same call is refused each time.
    conf = BeartypeConf(is_pep484_tower=True, is_random=False)

    def fits(value: object, hint: Any) -> bool:
        with jaxtyped("context"):  # sizes that checks of a caller have bound do not count
            return is_bearable(value, hint, conf=conf)

    return fits


def _fits(value: object, hint: Any) -> bool:
    return _tester()(value, hint)


def _conversions(value: Any) -> Iterator[Any]:
    """Yield the value, then its conversions. A number of numpy is always Python's, which files can store."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
    yield value
    if isinstance(value, list):
        yield tuple(value)
    if isinstance(value, str):
        yield Path(value)


def _describe(hint: Any) -> str:
    """Return a type in words, such as "int or None", or the choices of a Literal."""
    if hint is NoneType:
        return "None"
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_describe, get_args(hint)))
    if isinstance(hint, type) and not get_args(hint):
        return hint.__name__
    return MODULES.sub("", str(hint))


def _show(value: object) -> str:
    """Return a short value with its type, or the type alone."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    is_short = isinstance(value, str | float | bool)
    if isinstance(value, int):
        is_short = abs(value) < 2**63  # Python refuses to print some larger ones
    kind = type(value).__name__
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, list | tuple) and value:
        return f"a {kind} that begins with {_show(value[0])}"  # the item that was checked
    return f"{str(value)[:60]!r} ({kind})" if is_short else f"a value of type {kind}"
