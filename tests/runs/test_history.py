"""Histories: lines in one schema, complete after any kill, and cut where a run resumes."""

import json
import math
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from uvit_decay.runs import history
from uvit_decay.runs.history import Measurement, name_run


def at(step, **values):
    return Measurement(step, step / 44, 32 * step, values, {"weights": "ema", "times": [0.1, 0.2]})


def test_a_run_is_named_by_its_experiment_and_version():
    assert name_run(Path("runs/digits/version_3")) == "digits/version_3"
    assert name_run(Path("runs/mine")) == "mine"


def test_a_line_is_a_measurement_and_is_read_back(tmp_path):
    path = tmp_path / "probes.jsonl"
    assert history.read(path) == []
    for step in (20, 40):
        history.append(path, at(step, best_accuracy=0.5, fd=math.nan))
    first, second = map(json.loads, path.read_text().splitlines())
    assert first.keys() == {"step", "epoch", "images_seen", "values", "metadata"}
    assert second["values"] == {"best_accuracy": 0.5, "fd": None}
    assert history.read(path) == [at(step, best_accuracy=0.5, fd=math.nan) for step in (20, 40)]


def test_a_run_from_an_earlier_step_replaces_what_was_measured_later(tmp_path):
    path = tmp_path / "probes.jsonl"
    for step, value in ((20, 1.0), (40, 2.0), (60, 3.0), (40, 4.0)):
        history.append(path, at(step, value=value))
    assert history.read(path) == [at(20, value=1.0), at(40, value=4.0)]


def test_a_run_that_is_killed_while_it_writes_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "probes.jsonl"
    history.append(path, at(20, value=1.0))

    def killed(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        history.append(path, at(40, value=2.0))
    assert history.read(path) == [at(20, value=1.0)]


@pytest.fixture(params=["measurements", "rows"])
def kind(request, tmp_path):
    """Return a function that cuts a kind of history, the path of one with steps 20, 40 and 60, and its steps."""
    path = tmp_path / "history"
    if request.param == "measurements":
        for step in (20, 40, 60):
            history.append(path, at(step, value=1.0))
        return history.cut, path, lambda: [measurement.step for measurement in history.read(path)]
    path.write_bytes(b"step,train/loss,val/loss\r\n20,,1.0\r\n40,,1.0\r\n40,1.0,\r\n60,1.0,\r\n")
    return history.cut_rows, path, lambda: [step for step, _ in history.read_rows(path)]


def test_a_history_is_cut_in_its_place_or_copied(kind, tmp_path):
    cut, path, list_steps = kind
    before = path.read_bytes()
    cut(40, tmp_path / "none", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    cut(40, path, tmp_path / "copy")
    assert path.read_bytes() == before
    cut(40, path, path)
    assert list_steps() == [20, 40]
    assert path.read_bytes() == (tmp_path / "copy").read_bytes()
    cut(10, path, path)
    assert not path.exists()


def test_a_kill_while_a_history_is_cut_leaves_it_whole(kind, monkeypatch):
    cut, path, _ = kind
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cut(40, path, path)
    assert path.read_bytes() == before
