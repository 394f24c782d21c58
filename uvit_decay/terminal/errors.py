"""Errors that a user can fix: one clear line, no traceback, exit code 2."""

import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import currentframe
from io import TextIOWrapper
from numbers import Real
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, get_args

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # errors of a disk that takes no more data
# Errors of a path that leads nowhere.
CLOSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP)
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and bytes that are not UTF-8
ARGUMENT = re.compile(r"`([a-z][\w.]*)`")  # the name of an argument in a message, or of a setting of train.py
LONGEST = 2000  # characters of a message
MOST_SEED = 2**32 - 1  # numpy's and Lightning's limit
PREEMPTED = 85  # exit code of a run that saved because it was warned; free of other meanings, for scripts that requeue


def escape_unprintable(text: str) -> str:
    r"""Return text with its control characters and lone surrogates as escapes such as \x1b."""
    return UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


class UserError(Exception):
    """An error in the user's input, with a message of one line: what is wrong, where, and how to fix it.

    Not a ValueError, which jsonargparse would catch and wrap in a longer message.

    Args:
        message: the line. It names arguments as Python does, in backticks; programs print their flags instead.
        argument: the argument at fault, with which the line begins.
    """

    def __init__(self, message: str, argument: str = "") -> None:
        if argument:
            message = f"`{argument}`: {message}"
        if message.startswith("Caught UserError in "):  # torch adds the traceback of a reader process
            message = message.rpartition("UserError: ")[2].strip()
        # Names from files may contain line breaks, sequences that steer a terminal, or a megabyte.
        line = escape_unprintable(" ".join(message.splitlines()))
        if len(line) > LONGEST:
            line = f"{line[: LONGEST * 3 // 4]} ... {line[-LONGEST // 4 + 5 :]}"
        super().__init__(line)


class RunEnded(UserError):
    """The checkpoint is already at the end of the run; there is nothing left to resume."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers send before they reclaim a machine; Lightning ends the run as at Ctrl-C."""


class Preempted(KeyboardInterrupt):
    """SIGUSR1 or SIGUSR2, by which a scheduler warns that the time of a job is nearly over."""


ENDS: dict[type[KeyboardInterrupt], tuple[str, int]] = {  # last line and exit code
    KeyboardInterrupt: ("interrupted", 128 + signal.SIGINT),
    Terminated: ("terminated", 128 + signal.SIGTERM),
    Preempted: (f"preempted: exit code {PREEMPTED} asks for the same command again", PREEMPTED),
}


FindFlag = Callable[[str, Sequence[FrameType]], str | None]
_PROGRAMS: list[FindFlag] = []  # of the bodies of `name_flags`, the innermost last


@contextmanager
def name_flags(find_flag: FindFlag) -> Iterator[None]:
    """Replace the names of arguments in a UserError of the body, and in `with_flags`, by the flags of a program.

    Args:
        find_flag: function (name, frames) -> flag; None if the program has no such flag, then the name stays. The
            frames are the calls that lead to the message, the innermost first.
    """
    _PROGRAMS.append(find_flag)
    try:
        yield
    except UserError as error:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        error.args = (_replace_names(str(error), find_flag, frames[::-1]),)
        raise
    finally:
        _PROGRAMS.pop()


def with_flags(remark: str | UserError) -> str:
    """Return a remark, or a caught error, in which names of arguments in backticks are flags of the program."""
    frames = [frame for frame, _ in walk_stack(currentframe())]
    if isinstance(remark, UserError):
        frames = [frame for frame, _ in walk_tb(remark.__traceback__)][::-1]
        remark = str(remark)
    for find_flag in reversed(_PROGRAMS):
        remark = _replace_names(remark, find_flag, frames)
    return remark


def _replace_names(message: str, find_flag: FindFlag, frames: Sequence[FrameType]) -> str:
    for name in ARGUMENT.findall(message):
        flag = find_flag(name, frames)
        if flag is not None:
            message = message.replace(f"`{name}`", flag)
    return message


def one_line(error: BaseException) -> str:
    """Return the message of an error as one line of at most 200 characters, or its type if it has none."""
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextmanager
def explain(what: str | Path, *kinds: type[Exception], hint: str = "") -> Iterator[None]:
    """Turn errors of these `kinds` in the body into a UserError of one line: `what`, the reason and a `hint`.

    A UserError of the body, which explains itself, is raised as it is.
    """
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        reason = one_line(error)
        if isinstance(error, OSError) and error.strerror and str(error.filename) in str(what):
            reason = error.strerror  # without a second copy of the path
        message = f"{what}: {reason}"
        if hint:
            message += f"; {hint}"
        raise UserError(message) from error


def check_whole(least: int, most: int = 2**31 - 1, **numbers: int | None) -> None:
    """Raise a UserError that names the first of `numbers` that is not an int from `least` to `most`."""
    for name, number in numbers.items():
        if type(number) is not int or not least <= number <= most:
            raise UserError(f"`{name}` must be a whole number from {least} to {most}, got {number}")


def check_numbers(interval: str, **numbers: float) -> None:
    """Raise a UserError that names the first of `numbers` outside an interval such as "[0, 1)", or not a number."""
    low, high = map(float, interval[1:-1].split(","))
    open_ends = []
    if interval[0] == "(":
        open_ends.append(low)
    if interval[-1] == ")":
        open_ends.append(high)
    for name, number in numbers.items():
        is_number = isinstance(number, Real) and not isinstance(number, bool)
        if not (is_number and low <= number <= high and number not in open_ends):
            raise UserError(f"`{name}` must lie in {interval}, got {number}")


def check_choice(known: Any, **values: object) -> None:
    """Raise a UserError that names the first of `values` outside `known`, a Literal or a collection of str."""
    names = get_args(known) or tuple(known)
    for name, value in values.items():
        if not (isinstance(value, str) and value in names):
            raise UserError(f"`{name}` must be {' or '.join(names)}, got {value!r}")


def require_shape(shape: Sequence[int], **tensors: Any) -> None:
    """Raise a UserError that names the first of `tensors` with another shape, which operations might broadcast."""
    for name, tensor in tensors.items():
        if tensor.shape != tuple(shape):
            raise UserError(f"`{name}` must have the shape {tuple(shape)}, got {tuple(tensor.shape)}")


@contextmanager
def user_errors() -> Iterator[None]:
    """Exit on a `UserError` in the body with one line and code 2, and on a signal with its code in `ENDS`.

    If whoever read the output has gone, as in `| head`, the code is 141.

    A full disk, if Lightning's loggers raise it, and a path that cannot be entered are one line, too. Lightning turns
    Ctrl-C into `sys.exit(1)`; the exit code of the shell convention, 128 + number of the signal, is restored here.
    """
    try:
        # Discard output if standard output or error is closed; print names that are not UTF-8 with backslashes.
        sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  until the end
        sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
        if isinstance(sys.stdout, TextIOWrapper):  # not a stream of a notebook, or of a test
            sys.stdout.reconfigure(errors="backslashreplace")  # as standard error has it
        yield
        sys.stdout.flush()  # what cannot be printed is an error now, not at the end of the interpreter
    except UserError as error:
        sys.exit(_fail(f"error: {error}", 2))
    except BrokenPipeError:
        sys.exit(_fail("the program that read the output has ended", 141))
    except OSError as error:
        if error.errno in NO_ROOM:
            line = f"cannot write {error.filename or 'a file of this run'}: {error.strerror}"
        elif error.errno in CLOSED and error.filename:
            line = f"cannot open {error.filename}: {error.strerror}"
        else:
            raise
        sys.exit(_fail(f"error: {UserError(line)}", 2))
    except KeyboardInterrupt as error:
        sys.exit(_fail(*ENDS[type(error)]))
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):
            sys.exit(_fail(*ENDS[type(stop.__context__)]))
        raise


def _fail(message: str, code: int) -> int:
    """Flush standard output, print `message` to standard error, return `code`; drop what cannot be printed."""
    for stream, text in ((sys.stdout, ""), (sys.stderr, f"{message}\n")):
        try:
            stream.write(text)
            stream.flush()
        except OSError:  # it is closed, or its disk is full; the interpreter would try again when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code
