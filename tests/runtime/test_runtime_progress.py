"""Progress of commands: lines in a log file, bars on a terminal."""

import io
import os
import re
import sys
import time
from types import SimpleNamespace

import pytest

from uvit_decay.commands.compare import compare
from uvit_decay.commands.convert import main
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.progress import lines_every, track

SHORT = 0.05  # seconds between lines


@pytest.fixture(autouse=True)
def often():
    with lines_every(SHORT):
        yield


def lines_of(capsys):
    return capsys.readouterr().err.splitlines()


def test_a_silent_command_has_a_line_of_its_own(capsys):
    with track():
        time.sleep(0.3)
    lines = lines_of(capsys)
    assert 2 <= len(lines) <= 6
    assert all(re.fullmatch(r".+ after 00:00", line) for line in lines)


@pytest.mark.parametrize("command", ["export", "import"])
def test_a_conversion_has_lines(command, tmp_path, monkeypatch, capsys):
    def convert(*args, **options):
        time.sleep(0.3)
        return ""

    for name in ("export_file", "import_official"):
        monkeypatch.setattr(f"uvit_decay.checkpoint.convert.{name}", convert)
    main([command, str(tmp_path / "from.pth"), str(tmp_path / "to.safetensors")])
    assert len(lines_of(capsys)) >= 2


def test_runs_that_are_compared_are_counted(tmp_path, monkeypatch, capsys):
    def read(folder):
        time.sleep(0.3)
        return SimpleNamespace(options={}, folder=folder)

    monkeypatch.setattr("uvit_decay.compare.runs.Run.read", read)
    with pytest.raises(UserError, match="--by"):
        compare([tmp_path, tmp_path], out=tmp_path / "out.png")
    assert lines_of(capsys)[-1].startswith("reading runs: 1/2 runs ")


def test_the_innermost_work_is_shown_with_what_it_belongs_to(capsys):
    with track(), track("outer"), track("inner", 8, "image", 2) as work:
        time.sleep(0.15)
        work.update(3)
        time.sleep(0.15)
    lines = lines_of(capsys)
    assert lines[0] == "outer: inner: 2/8 images after 00:00"
    assert re.fullmatch("outer: inner: 5/8 images after 00:00, 00:00 left", lines[-1])


def test_work_without_a_total_counts(capsys):
    with track("scanning", None, "file") as work:
        work.update(1234)
        time.sleep(0.2)
    assert lines_of(capsys)[-1] == "scanning: 1,234 files after 00:00"


def test_quick_work_and_that_of_other_processes_have_no_lines(capsys):
    with lines_every(60), track("quick", 2, "image") as work:
        work.update()
    with track("another process", 2, "image", shown=False):
        time.sleep(0.15)
    with lines_every(float("inf")), track("hidden", 2, "image"):
        time.sleep(0.15)
    assert lines_of(capsys) == []


def test_lines_end_with_the_work_even_if_it_fails(capsys):
    with pytest.raises(ZeroDivisionError), track("failing", 2, "image"):
        raise ZeroDivisionError
    time.sleep(0.15)
    assert lines_of(capsys) == []


def test_a_terminal_gets_a_bar(monkeypatch):
    terminal = io.StringIO()
    terminal.fileno = lambda: 2
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((120, 40)))
    with track("probes", 4, "level") as work:
        work.update(4)
        time.sleep(0.15)
    assert re.search(r"probes: 100%\|.*4/4", terminal.getvalue())
    assert " after " not in terminal.getvalue()
