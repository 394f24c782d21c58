"""Checks of messages by their fragments: flags, values, files and names of classes, never sentences.

A fragment is a string, a number or a path that must stand in the message as a whole word: 1 is not found in "10" or
"1.5" (but in "1.0"), and "dim" is not found in "dims". Tests may pass several fragments as one tuple.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest

from uvit_decay.terminal.errors import UserError


def find_line(text: str | Iterable[str], *fragments: object) -> str:
    """Return the first line of a printed text, or of several lines, that has all `fragments`; fail if there is none."""
    wanted = list(_flatten(fragments))
    assert wanted, "name a fragment: every text has all of none"
    lines = text.splitlines() if isinstance(text, str) else list(text)
    for line in lines:
        if not _missing(line, wanted):
            return line
    if len(lines) == 1:
        pytest.fail(f"no {' and no '.join(_missing(lines[0], wanted))} in {lines[0]!r}")
    return pytest.fail("\n".join([f"no line with all of {', '.join(wanted)} in:", *lines]))


@contextmanager
def raises_user_error(*fragments: object) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Check that the body raises a UserError, with a message of one line that has all `fragments`."""
    with pytest.raises(UserError) as caught:
        yield caught
    message = str(caught.value)
    assert message
    assert "\n" not in message
    find_line(message, *fragments)


def refused(capsys: pytest.CaptureFixture, command: Callable[..., None], *args: object) -> str:
    """Return the line with which a command refuses its input: the last on stderr, of exit code 2 and no traceback."""
    with pytest.raises(SystemExit) as stop:
        command(*args)
    assert stop.value.code == 2
    return check_refusal(capsys.readouterr().err)


def check_refusal(stderr: str) -> str:
    """Return the last line of what a refused command printed, which is its only error; warnings may come before it."""
    assert "Traceback" not in stderr
    lines = stderr.strip().splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    return lines[-1]


def _missing(line: str, fragments: list[str]) -> list[str]:
    return [fragment for fragment in fragments if not _whole(fragment).search(line)]


def _whole(fragment: str) -> re.Pattern[str]:
    """Return a pattern of `fragment` that is not part of a longer word or number."""
    before = r"(?<![\w.])(?<!\d,)(?<!\d)" if fragment[:1].isdigit() else r"(?<!\w)" if fragment[:1].isalpha() else ""
    after = r"(?!\w|,\d|\.(?!0\b)\d)" if fragment[-1:].isdigit() else r"(?!\w)" if fragment[-1:].isalpha() else ""
    return re.compile(before + re.escape(fragment) + after)


def _flatten(fragments: object) -> Iterator[str]:
    if isinstance(fragments, tuple):
        for fragment in fragments:
            yield from _flatten(fragment)
    else:
        yield str(fragments)
