"""Progress of commands: lines in a log file, bars on a terminal."""

import io
import os
import re
import sys
import time

import pytest

from uvit_decay.commands.compare import compare
from uvit_decay.commands.convert import main
from uvit_decay.compare.layers import ChosenProbes
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.progress import INTERVAL, print_line, track

SHORT = 0.05  # seconds between lines


@pytest.fixture
def often():
    """Shorten the interval between lines, as the outermost work."""
    with track(every=SHORT):
        yield


def lines_of(capsys):
    return capsys.readouterr().err.splitlines()


def test_a_silent_command_has_a_line_of_its_own(capsys):
    with track(every=SHORT):
        time.sleep(0.3)
    lines = lines_of(capsys)
    assert 2 <= len(lines) <= 6
    assert all(re.fullmatch(r".+ after 00:00", line) for line in lines)


@pytest.mark.parametrize("command", ["export", "import"])
def test_a_conversion_has_lines(command, tmp_path, monkeypatch, capsys, often):
    def convert(*args, **options):
        time.sleep(0.3)
        return ""

    for name in ("export_file", "import_official"):
        monkeypatch.setattr(f"uvit_decay.checkpoint.convert.{name}", convert)
    main([command, str(tmp_path / "from.pth"), str(tmp_path / "to.safetensors")])
    assert len(lines_of(capsys)) >= 2


def test_runs_that_are_compared_are_counted(tmp_path, monkeypatch, capsys, often):
    def read(folder, chosen):
        time.sleep(0.3)
        if folder.name == "b":
            raise UserError("no run")

    monkeypatch.setattr("uvit_decay.compare.runs.FinishedRun.read", read)
    with pytest.raises(UserError, match="no run"):
        compare([tmp_path / "a", tmp_path / "b"], out=tmp_path / "out.png", chosen=ChosenProbes())
    assert lines_of(capsys)[-1].startswith("reading runs: 1/2 runs ")


def test_the_innermost_work_is_shown_with_what_it_belongs_to(capsys):
    with track(every=SHORT), track("outer"), track("inner", 8, "image", 2) as work:
        time.sleep(0.15)
        work.update(3)
        time.sleep(0.15)
    lines = lines_of(capsys)
    assert lines[0] == "outer: inner: 2/8 images after 00:00"
    assert re.fullmatch("outer: inner: 5/8 images after 00:00, 00:00 left", lines[-1])


def test_work_without_a_total_counts(capsys):
    with track("scanning", None, "file", every=SHORT) as work:
        work.update(1234)
        time.sleep(0.2)
    assert lines_of(capsys)[-1] == "scanning: 1,234 files after 00:00"


def test_counts_without_a_title_are_named_by_their_unit(capsys):
    for total in (2010, None):
        with track("", total, "step", 2000) as work:
            work.update(3, "loss=0.5")
            print_line(work)
    assert [re.sub(r"\d\d:\d\d", "_", line) for line in lines_of(capsys)] == [
        "step 2003/2010 after _, _ left, loss=0.5",
        "step 2003 after _, loss=0.5",
    ]


@pytest.mark.parametrize("every", [INTERVAL, 1e300, float("inf")])
def test_quick_work_has_no_lines(capsys, every):
    with track("quick", 2, "image", every=every) as work:
        work.update()
    assert lines_of(capsys) == []


def test_hidden_work_has_no_lines_nor_has_the_work_within(capsys, monkeypatch):
    monkeypatch.setattr("uvit_decay.runtime.progress.terminal_width", lambda: 120)
    with track("another process", shown=False, every=SHORT), track("within", 2, "image") as work:
        print_line(work)
        time.sleep(0.15)
    assert lines_of(capsys) == []
    with track("rehearsal", every=SHORT), track("hidden", shown=False), track("within", 2, "image"):
        time.sleep(0.15)
    assert {line.partition(" after")[0] for line in lines_of(capsys)} == {"rehearsal"}


def test_lines_end_with_the_work_that_fails(capsys):
    with pytest.raises(ZeroDivisionError), track("failing", 2, "image", every=SHORT):
        raise ZeroDivisionError
    time.sleep(0.15)
    assert lines_of(capsys) == []


def test_a_terminal_gets_a_bar(monkeypatch):
    terminal = io.StringIO()
    terminal.fileno = lambda: 2
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((120, 40)))
    with track("probes", 4, "level", every=SHORT) as work:
        work.update(4)
        time.sleep(0.15)
    assert re.search(r"probes: 100%\|.*4/4", terminal.getvalue())
    assert " after " not in terminal.getvalue()
