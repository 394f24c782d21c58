"""Histories: lines in one schema, whole whatever happens, and joined by the resumed run."""

import json
import math
import os

import pytest

from uvit_decay.runs import history
from uvit_decay.runs.history import Measurement


def at(step, **values):
    return Measurement(step, step / 44, 32 * step, values, {"weights": "ema", "times": [0.1, 0.2]})


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


def test_a_copy_ends_at_its_step(tmp_path):
    source, target = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    history.copy_until(40, source, target)
    assert not target.exists()
    for step in (20, 40, 60):
        history.append(source, at(step, value=1.0))
    history.copy_until(40, source, target)
    assert [measurement.step for measurement in history.read(target)] == [20, 40]
