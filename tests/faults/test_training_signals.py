"""Signals to training before it begins, in a job of SLURM, in an evaluation, on several ranks, twice, and a pause."""

from __future__ import annotations

import signal

import pytest
from programs import Moment
from small_training import differences, goes_on_from, runs

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 85, signal.SIGUSR2: 85}
STEP = "Task.optimizer_step"
SLURM = {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SLURM |= {"SLURM_JOB_NAME": "train", "SLURM_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_training_ends_it_at_once(training, tmp_path, number):
    program = training.run(tmp_path, at=Moment("LastCheckpoint.setup", 0, 5), number=number)
    assert program.wait() == CODES[number], program.stderr
    assert not [*tmp_path.rglob("*.ckpt")]
    assert "Traceback" not in program.stderr


def test_a_warning_in_a_job_of_slurm_saves_the_run_in_its_own_folder_and_leaves_the_job_to_its_script(
    training, tmp_path
):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\ntouch {tmp_path}/requeued\n")
    scontrol.chmod(0o755)
    environment = {**SLURM, "PATH": f"{scontrol.parent}:/usr/bin:/bin"}
    program = training.run(tmp_path, at=Moment(STEP, 6, 9), number=signal.SIGUSR1, environment=environment)
    assert program.wait() == 85, program.stderr
    assert program.last_line == "preempted: exit code 85 asks for the same command again"
    assert not (tmp_path / "requeued").exists()
    assert {path.name for path in tmp_path.rglob("*.ckpt")} == {"last.ckpt", "previous.ckpt"}
    again = training.run(tmp_path, environment=environment)
    assert again.wait() == 0
    assert goes_on_from(again) == 7


def test_all_ranks_stop_at_the_same_step_if_one_is_warned(training, tmp_path):
    pair = training.ranks(tmp_path, "--trainer.max_steps=30", at=Moment(STEP, 3, 9), number=signal.SIGUSR1)
    assert [rank.wait() for rank in pair] == [85, 85], pair[0].stderr + pair[1].stderr
    again = training.run(tmp_path, "--trainer.max_steps=30")
    assert goes_on_from(again) == 10
    assert again.wait() == 0


def test_two_signals_of_two_kinds_still_save(training, tmp_path):
    program = training.start(tmp_path, at=Moment(STEP, 4, 9), number=signal.SIGSTOP)
    program.wait_until_stopped()
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGCONT):
        program.send(number)
    assert program.wait() in (85, 143)
    again = training.run(tmp_path)
    assert goes_on_from(again) == 5
    assert not differences(runs(tmp_path)[-1], training.undisturbed[0], 5)


def test_a_pause_changes_nothing(training, tmp_path):
    program = training.start(tmp_path, at=Moment("LinearProbes.evaluate", 0, 1000), number=signal.SIGSTOP)
    program.wait_until_stopped()
    program.send(signal.SIGCONT)
    assert program.wait() == 0
    assert not differences(runs(tmp_path)[-1], training.undisturbed[0])
