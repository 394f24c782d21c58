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
the reverse. argparse reads the options here. jsonargparse, which reads the options of train.py, wants values for
switches, prefixes for groups and `--trust+` for lists, reads the file name `null` as None, and is slower than a whole
--help. cyclopts rounds `--steps 2.7` to 3, reads `--weights none` as None, and more than doubles the time of a --help.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from types import FrameType, NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from uvit_decay.terminal.errors import UserError, name_flags, user_errors
from uvit_decay.terminal.program import localise, quiet_libraries
from uvit_decay.terminal.suggestions import did_you_mean
from uvit_decay.terminal.typed import check_ranges, split_hint

ENTRY = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)  # of the section Args: of a docstring
UNKNOWN = re.compile(r"unrecognized arguments: ([^\s=]+)")
LACKING = re.compile(r"([^\s/]+): expected one argument$")
CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class Advanced:
    """Marker in an annotation: the option is listed under a separate heading, for advanced use."""


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong option, or an abbreviated one, in one line, without the usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise UserError(with_hint(message.removeprefix("argument "), self._option_string_actions))


def with_hint(message: str, options: Iterable[str]) -> str:
    """Return a message of argparse in our words, with a hint if it names an unknown option or value."""
    unknown = UNKNOWN.search(message)
    if unknown:
        return f"unknown option {unknown[1]}{did_you_mean(unknown[1], options)}"
    lacking = LACKING.search(message)
    if lacking:  # the value of an option that begins with a hyphen
        return f"{message}; give a value such as -1,2 after an equals sign, {lacking[1]}=-1,2"
    choice = CHOICE.search(message)
    if choice:
        return message + did_you_mean(choice[1], [known.strip("'") for known in choice[2].split(", ")])
    return message


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
        args: the words after the program's name; None takes the words of this process.
    """
    with user_errors():
        quiet_libraries()
        parse(commands, sys.argv[1:] if args is None else args, about, prog)()


def parse(
    commands: Callable | Mapping[str, Callable],
    args: Sequence[str],
    about: str = "",
    prog: str | None = None,
) -> Callable[[], Any]:
    """Return the call of a function that the arguments ask for; see `run`."""
    parser = Parser(prog=prog, description=localise(about), formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers: dict[str, argparse.ArgumentParser] = {}
    if isinstance(commands, Mapping):
        group = parser.add_subparsers(dest="<command>", metavar="command", required=True)
        for name, function in commands.items():
            description, _ = _read_docstring(function)
            subparsers[name] = group.add_parser(name, help=_first_line(description), description=description)
            _add_options(subparsers[name], function)
    else:
        _add_options(parser, commands)
    parsed, unknown = parser.parse_known_args(respell(args, "_", "-"))
    given = vars(parsed)
    used, function = parser, commands
    if isinstance(commands, Mapping):
        name = given["<command>"]
        used, function = subparsers[name], commands[name]
    if unknown:
        used.error(f"unrecognized arguments: {' '.join(unknown)}")
    flags = _list_flags(used)

    def find_flag(name: str, _: Sequence[FrameType]) -> str | None:
        return flags.get(name)

    with name_flags(find_flag):
        call = _call(function, given)
    return partial(name_flags(find_flag)(call.func), **call.keywords)


def _list_flags(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the flags of the options by the names of the parameters."""
    flags = {}
    for action in parser._actions:
        if action.option_strings:
            is_switch = isinstance(action, argparse.BooleanOptionalAction)  # --clip and --no-clip
            flags[action.dest] = action.option_strings[0 if is_switch else -1]
    return flags


def respell(args: Sequence[str], old: str, new: str) -> list[str]:
    """Replace a character in the names of all options, but not in their values."""

    def respell(option: re.Match[str]) -> str:
        return "--" + option[0].removeprefix("--").replace(old, new)

    return [re.sub("^--[^=]+", respell, arg) for arg in args]


def _call(owner: Any, given: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a call of a function or dataclass with the given options that are its parameters."""
    hints = get_type_hints(owner)
    values = {}
    for name in inspect.signature(owner).parameters:
        if is_dataclass(hints[name]):
            values[name] = _call(hints[name], given)()
        elif name in given:
            values[name] = given[name]
    check_ranges(get_type_hints(owner, include_extras=True), values)
    return partial(owner, **values)


def _read_docstring(owner: Any) -> tuple[str, dict[str, str]]:
    """Return the docstring without its sections, and the documentation of each parameter, inherited fields included."""
    about = ""
    words = {}
    for part in reversed(getattr(owner, "__mro__", [owner])):
        text = localise(inspect.cleandoc(part.__doc__ or ""))
        about = re.split(r"\n(?:Args|Raises):\n", text)[0].strip()
        for name, entry in ENTRY.findall(text.partition("\nArgs:\n")[2]):
            words[name] = " ".join(entry.split()).removesuffix(".")
    return about, words


def _first_line(about: str) -> str:
    """Return the first line of a docstring without its full stop."""
    return about.partition("\n")[0].removesuffix(".")


def _add_options(
    parser: argparse._ActionsContainer, owner: Any, advanced: argparse._ActionsContainer | None = None
) -> None:
    """Add an option for each parameter of a function or dataclass; groups come last, each with its advanced options."""
    hints = get_type_hints(owner, include_extras=True)
    _, words = _read_docstring(owner)
    parameters = inspect.signature(owner).parameters.values()
    for parameter in sorted(parameters, key=lambda parameter: is_dataclass(hints[parameter.name])):
        hint = hints[parameter.name]
        if is_dataclass(hint):
            about, _ = _read_docstring(hint)
            title = _first_line(about)
            group = parser.add_argument_group(title)
            _add_options(group, hint, parser.add_argument_group(f"{title}, advanced"))
            continue
        _, notes = split_hint(hint)
        group = parser
        if advanced is not None and Advanced in notes:
            group = advanced
        _add_option(group, parameter, hint, words.get(parameter.name, ""))


def _add_option(parser: argparse._ActionsContainer, parameter: inspect.Parameter, hint: Any, words: str) -> None:
    """Add the option of one parameter, given its annotation and its documentation."""
    hint, notes = split_hint(hint)
    required = parameter.default is parameter.empty
    positional = required and parameter.kind is not parameter.KEYWORD_ONLY
    # Options that are not given stay out of the result, so that the function's defaults are used.
    how: dict[str, Any] = {"default": argparse.SUPPRESS}
    how["help"] = _describe(hint, parameter.default, words).replace("%", "%%")
    how |= _reading(hint, parameter, positional)
    if positional:
        parser.add_argument(parameter.name, **how)
    else:
        names = [_flag(parameter.name)]
        names += [note for note in notes if isinstance(note, str)]
        parser.add_argument(*sorted(names, key=len), dest=parameter.name, required=required, **how)


def _describe(hint: Any, default: Any, words: str) -> str:
    """Return the help of an option: its documentation, its choices if there are several values, and its default."""
    has_default = type(default) not in (type, NoneType, bool) and default != ()
    if has_default and "default:" not in words:
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        words += f"; default: {shown}"
    if get_origin(hint) is tuple:
        choices = _choices(get_args(hint)[0])
        if choices:
            return f"of {','.join(choices)}; {words}"
    return words


def _reading(hint: Any, parameter: inspect.Parameter, positional: bool) -> dict[str, Any]:
    """Return the arguments of argparse by which an option of this type is read."""
    if hint is bool:
        return {"action": "store_true" if parameter.default is False else argparse.BooleanOptionalAction}
    choices = _choices(hint)
    if choices:
        return {"type": str, "choices": choices}
    if get_origin(hint) is tuple:
        return {"type": partial(_read_list, _flag(parameter.name), get_args(hint))}
    if get_origin(hint) is Sequence:
        kind, _ = split_hint(get_args(hint)[0])
        return {"type": kind, "nargs": "+"} if positional else {"type": kind, "action": "append"}
    return {"type": hint}


def _read_list(flag: str, types: tuple[Any, ...], text: str) -> tuple[Any, ...]:
    """Return values that are separated by commas, given the arguments of the type of their tuple."""
    words = [word.strip() for word in text.split(",")]
    choices = _choices(types[0])
    if choices:
        if not set(words) <= set(choices):
            raise UserError(f"{flag} takes some of {','.join(choices)}, got {text!r}")
        values = tuple(words)
    else:
        try:
            values = tuple(types[0](word) for word in words)
        except ValueError as error:
            raise UserError(f"{flag} takes numbers separated by commas, got {text!r}") from error
    if types[-1] is not ... and len(values) != len(types):
        raise UserError(f"{flag} takes {len(types)} numbers separated by commas, got {text!r}")
    return values


def _choices(hint: Any) -> tuple[str, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
