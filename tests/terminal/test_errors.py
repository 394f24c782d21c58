"""Errors that a user can fix are one line."""

import errno
from contextlib import redirect_stdout
from io import StringIO
from math import inf, nan

import pytest
from refusals import raises_user_error

from uvit_decay.terminal.errors import LONGEST, UserError, check_numbers, explain, user_errors


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EACCES, "Permission denied", "/data/x"), "cannot read /data/x: Permission denied; move it"),
        (OSError(errno.EACCES, "Denied", "/y"), "cannot read /data/x: [Errno 13] Denied: '/y'; move it"),
        (ValueError("two\n  lines"), "cannot read /data/x: two lines; move it"),
        (ValueError(), "cannot read /data/x: ValueError; move it"),
    ],
)
def test_an_error_is_explained_in_one_line(error, message):
    with pytest.raises(UserError) as raised, explain("cannot read /data/x", OSError, ValueError, hint="move it"):
        raise error
    assert str(raised.value) == message
    assert raised.value.__cause__ is error


def test_other_errors_and_those_that_explain_themselves_are_raised_as_they_are():
    with pytest.raises(KeyError, match="x"), explain("what", OSError):
        raise KeyError("x")
    with raises_user_error("it is so"), explain("what", Exception):
        raise UserError("it is so")


def test_a_number_outside_an_interval_is_named():
    check_numbers("[0, 1)", a=0.0, b=0.5)
    wrong = {"[0, 1)": (1.0, -0.1), "(0, 1]": (0.0, 1.1), "(0, inf)": (inf, nan), "[0, inf]": (nan, None)}
    for interval, numbers in wrong.items():
        for number in numbers:
            with raises_user_error("x", interval, number):
                check_numbers(interval, x=number)


@pytest.mark.parametrize(
    ("open_it", "reason"),
    [
        (lambda folder: (folder / ("x" * 300)).exists(), "File name too long"),
        (lambda folder: (folder / "file" / "in" / "it").stat(), "Not a directory"),
        (lambda folder: (folder / "loop" / "x").open(), "Too many levels of symbolic links"),
    ],
)
def test_a_path_that_cannot_be_entered_is_one_line(tmp_path, capsys, open_it, reason):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SystemExit) as stop, user_errors():
        open_it(tmp_path)
    assert stop.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: cannot open {tmp_path}")
    assert line.endswith(f": {reason}\n")


def test_other_errors_of_the_system_are_no_mistake_of_the_user():
    with pytest.raises(OSError, match="Input/output"), user_errors():
        raise OSError(errno.EIO, "Input/output error", "x")


def test_names_of_any_bytes_are_printed_and_steer_no_terminal(capsys):
    assert str(UserError("no \x1b[2J in caf\udce9")) == r"no \x1b[2J in caf\udce9"
    with user_errors():
        print("caf\udce9")
    assert capsys.readouterr().out == "caf\\udce9\n"


def test_a_message_with_a_name_of_a_megabyte_is_short():
    message = str(UserError(f"no class {'x' * 10**6}: rename it"))
    assert len(message) <= LONGEST
    assert message.startswith("no class xxx")
    assert message.endswith("xxx: rename it")


def test_errors_are_one_line_where_output_is_captured(capsys):
    """A StringIO, as of a notebook, cannot be reconfigured."""
    with redirect_stdout(StringIO()) as out:
        with user_errors():
            print("done")
        with pytest.raises(SystemExit), user_errors():
            raise UserError("no such file")
    assert out.getvalue() == "done\n"
    assert capsys.readouterr().err == "error: no such file\n"
