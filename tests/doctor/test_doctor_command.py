"""`train.py doctor` as a user starts it: its lines, its exit code, and that nothing is left."""

import json
import os
import re

import pytest
from conftest import train
from refusals import find_line

TINY = ["--model.net.dim=16", "--model.net.depth=2", "--model.sampling.steps=2", "--trainer.max_steps=40"]
EMA, LAST, PROBES = (
    {"class_path": f"uvit_decay.callbacks.{name}"} for name in ("EMA", "LastCheckpoint", "LinearProbes")
)
PREVIEW = {"class_path": "uvit_decay.callbacks.Preview", "init_args": {"every_n_steps": 15, "rows": 1}}


def callbacks(*chosen):
    """Return the flags of a run with these callbacks alone."""
    return ["--trainer.callbacks", json.dumps(chosen)]


QUICK = [*TINY, *callbacks(EMA, PREVIEW, LAST)]


def run_doctor(monkeypatch, capsys, folder, *flags):
    """Return the exit code, the lines and the error of `python train.py doctor`; nothing may be left in its folder."""
    monkeypatch.setattr("uvit_decay.doctor.rehearsal.SECONDS", 0.1)
    monkeypatch.setattr("uvit_decay.doctor.rehearsal.STEPS", 5)
    before = sorted(folder.rglob("*"))
    code = 0
    try:
        train(monkeypatch, folder, "doctor", *flags)
    except SystemExit as stop:
        code = stop.code
    assert "UVIT_DECAY_DOCTOR" not in os.environ  # it is for processes that Lightning starts
    assert sorted(folder.rglob("*")) == before
    printed = capsys.readouterr()
    return code, [*printed.out.splitlines(), *(line for line in printed.err.splitlines() if line.startswith("error"))]


def of(lines, subject):
    """Return the texts of the findings on a subject, with their levels."""
    return [line for line in lines if re.match(rf"\w+ +{subject}: ", line)]


def test_the_default_run_is_examined_and_nothing_is_left(tmp_path, monkeypatch, capsys, caplog):
    code, lines = run_doctor(monkeypatch, capsys, tmp_path, *TINY)
    assert code == 0
    assert lines[-1] == "0 errors, 1 warning"  # the warm-up is longer than the run
    findings = lines[:-1]
    assert all(re.match(r"(ok|note|warning|error) {2,7}[\w -]+: \S", line) for line in findings), lines
    assert len({line.index(line.split()[1]) for line in findings}) == 1  # subjects are aligned
    subjects = [re.match(r"\w+ +([\w -]+):", line)[1] for line in findings]
    assert subjects[:5] == ["versions", "devices", "ranks", "data", "weights"]
    assert {"memory", "speed", "Preview", "GenerationMetrics", "LinearProbes", "run", "disk"} <= set(subjects)
    assert "1437 images 1x8x8, 10 classes" in of(lines, "data")[0]
    assert find_line(caplog.messages, "step 40", "warm-up").startswith("warning: ")
    assert re.search(r"40 steps, about 0:\d\d:\d\d \(.* of training, ", of(lines, "run")[0])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--trainer.logger.save_dir=/proc/runs"], ("error:", "/proc/runs")),
        (["--model.net.image_size=16"], ("run:", "image_size 8", 16, "--model.net.image_size 8")),
        (["--ckpt_path=last"], ("error:", "--ckpt_path last", "runs/digits")),
        (
            ["--trainer.max_steps=1000000000000", *callbacks(LAST | {"init_args": {"keep_every_n_steps": 1}})],
            ("disk:", "GiB", "runs/digits", "keep_every_n_steps"),
        ),
        (callbacks(PROBES | {"init_args": {"layers": ["none"]}}), ("LinearProbes:", "none")),
    ],
)
def test_an_error_is_one_line_and_the_exit_code(tmp_path, monkeypatch, capsys, flags, named):
    code, lines = run_doctor(monkeypatch, capsys, tmp_path, *QUICK, *flags)
    assert code == 2
    (found,) = [one for one in lines if one.startswith("error")]
    find_line(found, named)


@pytest.mark.parametrize("more", [[], ["--trainer.callbacks+=LearningRateMonitor"]])
def test_a_run_with_minutes_is_examined(tmp_path, monkeypatch, capsys, more):
    flags = [*QUICK, "--trainer.max_steps=-1", "--minutes=1", *more]
    code, lines = run_doctor(monkeypatch, capsys, tmp_path, *flags)
    assert code == 0
    assert re.search(r" steps, about 0:0[01]:", of(lines, "run")[0])  # by the measurement that found the steps


def test_the_checkpoint_of_a_name_is_found_and_nothing_is_left_to_do_after_its_end(
    tmp_path, monkeypatch, capsys, caplog
):
    run = [*TINY, *callbacks(LAST), "--trainer.limit_val_batches=0", "--trainer.max_steps=4"]
    train(monkeypatch, tmp_path, "fit", *run)
    capsys.readouterr()
    code, lines = run_doctor(monkeypatch, capsys, tmp_path, *run, "--ckpt_path=auto")
    assert (code, lines) == (0, [])
    find_line(caplog.messages[-1], "step 4", "--trainer.max_steps")
    code, lines = run_doctor(monkeypatch, capsys, tmp_path, *run, "--ckpt_path=last", "--trainer.max_steps=30")
    assert code == 0, lines
    last = "runs/digits/version_0/checkpoints/last.ckpt"
    find_line(caplog.messages, "--ckpt_path last", last, "step 4")
    assert "30 steps from step 4, about" in of(lines, "run")[0]
