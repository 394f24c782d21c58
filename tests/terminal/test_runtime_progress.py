"""Progress of commands: lines in a log file, bars on a terminal."""

import io
import os
import re
import sys
import time

import pytest

from uvit_decay.terminal.progress import INTERVAL, print_line, track

SHORT = 0.05  # seconds between lines


def lines_of(capsys):
    return capsys.readouterr().err.splitlines()


def test_lines_come_no_more_often_than_they_are_wanted(capsys):
    with track("reading", 20, "image", every=SHORT) as work:
        for _ in range(20):
            time.sleep(0.01)
            work.update()
    lines = lines_of(capsys)
    assert 1 <= len(lines) <= 4
    assert all(re.match(r"reading: \d+/20 images after 00:00", line) for line in lines)


def test_the_innermost_work_is_shown_with_what_it_belongs_to(capsys):
    with track(every=SHORT), track("outer"), track("inner", 8, "image", 2) as work:
        time.sleep(0.1)
        work.update(3)
    (line,) = lines_of(capsys)
    assert re.fullmatch("outer: inner: 5/8 images after 00:00, 00:00 left", line)


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
    monkeypatch.setattr("uvit_decay.terminal.progress.terminal_width", lambda: 120)
    with track("another process", shown=False, every=SHORT), track("within", 2, "image") as work:
        print_line(work)
        time.sleep(0.1)
        work.update()
    assert lines_of(capsys) == []


def test_work_that_fails_has_no_more_lines(capsys):
    with pytest.raises(ZeroDivisionError), track("failing", 2, "image", every=SHORT) as work:
        raise ZeroDivisionError
    time.sleep(0.1)
    work.update()
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
