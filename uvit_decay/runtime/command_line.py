"""Command lines from functions: parameters become options, parameters that are dataclasses become groups of options.

    def probe(*, ckpt: Path, max_train: Annotated[int, Bounds(1, 2**31)] = 50_000, loading: Loading) -> None: ...

    run(probe, __doc__)                                  # --ckpt, --max-train and the fields of Loading
    run({"probe": probe, "compare": compare}, __doc__)   # subcommands of these names

Help comes from Google-style docstrings. Annotations say how an option is read:

    out: Path, without a default            a positional argument; after `*` a required option
    Path | None, Literal["ema", "raw"]      a value, one of some values; None is what is not given
    tuple[int, ...], tuple[float, float]    values separated by commas, of a tuple[Literal["a", "b"], ...] some of these
    Sequence[str]                           an option that may be repeated; as a positional argument, one or more values
    bool                                    --compile if the default is False, else --clip and --no-clip
    Annotated[int, Bounds(1, 9), "-n"]      a range of integers, another name of the option
    Annotated[float | None, Advanced]       of a dataclass: an option under a heading of its own in --help

A dataclass is always built, of the options that are given; its parameter needs no default. Hyphens are the canonical
spelling, as in other programs, and underscores are accepted; in train.py, where options are keys of YAML files, it is
the reverse. argparse reads the options here: jsonargparse, which reads those of train.py, wants values for switches,
prefixes for groups and `--trust+` for lists, reads the file name `null` as None, and is slower than a whole --help.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from uvit_decay.runtime.errors import UserError, check_whole, user_errors
from uvit_decay.runtime.launcher import check_launcher_variables
from uvit_decay.runtime.program import localised

ENTRY = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)  # of the section Args: of a docstring


@dataclass(frozen=True)
class Bounds:
    """Least and largest value of an integer option."""

    least: int
    most: int


UNKNOWN = re.compile(
    r"unrecognized arguments: (\S+)|invalid choice: '([^']*)' \(choose|Option '([^']+)' is not accepted"
)
CHOICES = re.compile(r"choose from (.*)\)")


class Advanced:
    """Marker in an annotation: the option is listed under a separate heading, for advanced use."""


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong option, or an abbreviated one, in one line, without the usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise UserError(with_hint(message.removeprefix("argument "), self._option_string_actions))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint on the known word that is most like this one, empty if none is like it."""
    names = {name.lstrip("-"): name for name in known}
    close = difflib.get_close_matches(word.lstrip("-").partition("=")[0], names, 1)
    return f"; did you mean {names[close[0]] if word.startswith('-') else close[0]}?" if close else ""


def with_hint(message: str, options: Iterable[str]) -> str:
    """Return the message of a parser with these options; of a word that it does not know, with the one like it."""
    if not (found := UNKNOWN.search(message)):
        return message
    choices = CHOICES.search(message)
    known = [choice.strip("'") for choice in choices[1].split(", ")] if choices else options
    return message + did_you_mean(next(filter(None, found.groups()), ""), known)


def run(
    commands: Callable | Mapping[str, Callable],
    about: str,
    prog: str | None = None,
    args: Sequence[str] | None = None,
) -> None:
    """Run the function of a command line or of its subcommand; exit with one line and code 2 on a mistake.

    Args:
        commands: a function, or several by the names of their subcommands.
        about: the text of --help.
        prog: such as "uvit-decay", where it is not the script's name.
        args: the words after the program's name; None takes those of this process.
    """
    with user_errors():
        check_launcher_variables()
        parse(commands, sys.argv[1:] if args is None else args, about, prog)()


def parse(
    commands: Callable | Mapping[str, Callable],
    args: Sequence[str],
    about: str = "",
    prog: str | None = None,
) -> Callable[[], Any]:
    """Return the call of a function that the arguments ask for; see `run`."""
    parser = Parser(prog=prog, description=localised(about), formatter_class=argparse.RawDescriptionHelpFormatter)
    if isinstance(commands, Mapping):
        subparsers = parser.add_subparsers(dest="<command>", metavar="command", required=True)
        for name, function in commands.items():
            about = _read_docstring(function)[0]
            first = about.partition("\n")[0].removesuffix(".")
            _add_options(subparsers.add_parser(name, help=first, description=about), function)
    else:
        _add_options(parser, commands)
    parsed, unknown = parser.parse_known_args(respelled(args, "_", "-"))
    given = vars(parsed)
    if unknown:
        used = subparsers.choices[given["<command>"]] if isinstance(commands, Mapping) else parser
        used.error(f"unrecognized arguments: {' '.join(unknown)}")
    return _call(commands[given["<command>"]] if isinstance(commands, Mapping) else commands, given)


def respelled(args: Sequence[str], old: str, new: str) -> list[str]:
    """Replace a character in the names of all options, but not in their values."""
    return [re.sub("^--[^=]+", lambda name: "--" + name[0][2:].replace(old, new), arg) for arg in args]


def check_bounds(owner: Any, values: Mapping[str, Any]) -> None:
    """Raise a UserError that names the first value out of the `Bounds` in the annotations of a function or class."""
    for name, hint in get_type_hints(owner, include_extras=True).items():
        for note in _plain(hint)[1]:
            if isinstance(note, Bounds) and values.get(name) is not None:
                check_whole(note.least, note.most, **{_flag(name): values[name]})


def _call(owner: Any, given: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a call of a function or dataclass with the given options that are its parameters."""
    hints, values = get_type_hints(owner), {}
    for name in inspect.signature(owner).parameters:
        if is_dataclass(hints[name]):
            values[name] = _call(hints[name], given)()
        elif name in given:
            values[name] = given[name]
    check_bounds(owner, values)
    return partial(owner, **values)


def _read_docstring(owner: Any) -> tuple[str, dict[str, str]]:
    """Return the docstring without its sections, and the documentation of each parameter, inherited fields included."""
    texts = [localised(inspect.cleandoc(part.__doc__ or "")) for part in reversed(getattr(owner, "__mro__", [owner]))]
    entries = [entry for text in texts for entry in ENTRY.findall(text.partition("\nArgs:\n")[2])]
    about = re.split(r"\n(?:Args|Raises):\n", texts[-1])[0].strip()
    return about, {name: " ".join(words.split()).removesuffix(".") for name, words in entries}


def _add_options(
    parser: argparse._ActionsContainer, owner: Any, advanced: argparse._ActionsContainer | None = None
) -> None:
    """Add an option for each parameter of a function or dataclass; groups come last, each with its advanced options."""
    hints, words = get_type_hints(owner, include_extras=True), _read_docstring(owner)[1]
    parameters = inspect.signature(owner).parameters.values()
    for parameter in sorted(parameters, key=lambda parameter: is_dataclass(hints[parameter.name])):
        hint = hints[parameter.name]
        if is_dataclass(hint):
            title = _read_docstring(hint)[0].partition("\n")[0].removesuffix(".")
            _add_options(parser.add_argument_group(title), hint, parser.add_argument_group(f"{title}, advanced"))
        else:
            group = advanced if advanced and Advanced in _plain(hint)[1] else parser
            _add_option(group, parameter, hint, words.get(parameter.name, ""))


def _add_option(parser: argparse._ActionsContainer, parameter: inspect.Parameter, hint: Any, words: str) -> None:
    (hint, notes), default, flag = _plain(hint), parameter.default, _flag(parameter.name)
    positional = default is parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY
    if type(default) not in (type, NoneType, bool) and default != () and "default:" not in words:
        words += f"; default: {','.join(map(str, default)) if isinstance(default, tuple) else default}"
    if get_origin(hint) is tuple and (choices := _choices(get_args(hint)[0])):
        words = f"of {','.join(choices)}; {words}"
    # What is not given stays out of the result, so that the defaults are those of the function.
    how: dict[str, Any] = {"type": hint, "help": words.replace("%", "%%"), "default": argparse.SUPPRESS}
    if hint is bool:
        del how["type"]
        how["action"] = "store_true" if default is False else argparse.BooleanOptionalAction
    elif choices := _choices(hint):
        how |= {"type": str, "choices": choices}
    elif get_origin(hint) is tuple:
        how["type"] = partial(_comma_separated, flag, get_args(hint))
    elif get_origin(hint) is Sequence:
        how |= {"type": get_args(hint)[0]} | ({"nargs": "+"} if positional else {"action": "append"})
    if positional:
        parser.add_argument(parameter.name, **how)
    else:
        names = sorted([flag, *(note for note in notes if isinstance(note, str))], key=len)
        parser.add_argument(*names, dest=parameter.name, required=default is parameter.empty, **how)


def _plain(hint: Any) -> tuple[Any, list[Any]]:
    """Return a type without `| None` and `Annotated`, and its annotations."""
    notes: list[Any] = []
    while get_origin(hint) in (Annotated, Union, UnionType):
        types = [part for part in get_args(hint) if part is not NoneType]
        hint, notes = types[0], notes + types[1:]
    return hint, notes


def _comma_separated(flag: str, types: tuple[Any, ...], text: str) -> tuple[Any, ...]:
    words, choices = [word.strip() for word in text.split(",")], _choices(types[0])
    if choices and not set(words) <= set(choices):
        raise UserError(f"{flag} takes some of {','.join(choices)}, got {text!r}")
    try:
        values = tuple(words) if choices else tuple(types[0](word) for word in words)
    except ValueError as error:
        raise UserError(f"{flag} takes numbers separated by commas, got {text!r}") from error
    if types[-1] is not ... and len(values) != len(types):
        raise UserError(f"{flag} takes {len(types)} numbers separated by commas, got {text!r}")
    return values


def _choices(hint: Any) -> tuple[str, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
