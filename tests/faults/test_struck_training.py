"""Training that is killed, told to stop, or robbed of its files: the same command ends as if nothing had been."""

from __future__ import annotations

import random
import shutil
import signal

import pytest
from programs import Moment
from refusals import find_line
from small_training import PLACES, STEP, differences, goes_on_from, read_training_state, runs

CODES = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 85}
OFTEN = [signal.SIGKILL] * 4 + [signal.SIGTERM] * 2 + [signal.SIGINT] * 2 + [signal.SIGUSR1] * 2
FEW = [("between checkpoints' names", signal.SIGKILL), ("in a step", signal.SIGUSR1)]
SLURM = {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SLURM |= {"SLURM_JOB_NAME": "train", "SLURM_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
DAMAGES = {
    "truncated": lambda content, place: content[:place],
    "zeroed tail": lambda content, place: content[:place] + bytes(len(content) - place),
    "flipped byte": lambda content, place: content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :],
}
pytestmark = pytest.mark.slow


def pytest_generate_tests(metafunc):
    exhaustive = metafunc.config.getoption("--exhaustive")
    if "place" in metafunc.fixturenames:
        cases = [(place, number) for number in OFTEN for place in PLACES] if exhaustive else FEW
        names = [f"{number.name} {place} {seed}" for seed, (place, number) in enumerate(cases)]
        metafunc.parametrize(("place", "number", "seed"), [(*case, i) for i, case in enumerate(cases)], ids=names)
    if "damage" in metafunc.fixturenames:
        cases = [(name, seed) for seed in range(8) for name in DAMAGES] if exhaustive else [("zeroed tail", 0)]
        metafunc.parametrize(("damage", "seed"), cases)


def test_a_signal_anywhere_costs_no_result(training, tmp_path, place, number, seed):
    whole, calls = training.undisturbed
    draw, function = random.Random(seed), PLACES[place]
    entry = draw.randrange(len(calls[function]))
    at = Moment(function, entry, draw.randrange(calls[function][entry]))
    struck = training.start(tmp_path, at=at, number=number)
    assert struck.wait() == CODES[number], struck.stderr
    again = training.start(tmp_path)
    assert again.wait() == 0, again.stderr
    (run,) = runs(tmp_path)
    found = differences(run, whole, goes_on_from(again), killed=number == signal.SIGKILL)
    assert not found, f"{at}: {found}"
    lost = max(0, struck.steps - goes_on_from(again))
    assert lost <= 4 if number == signal.SIGKILL else not lost, f"{at}: {lost} steps lost"


def test_a_signal_before_training_ends_it_at_once(training, tmp_path):
    program = training.start(tmp_path, at=Moment("LastCheckpoint.setup", 0, 5), number=signal.SIGUSR1)
    assert program.wait() == 85, program.stderr
    assert not [*tmp_path.rglob("*.ckpt")]
    assert "Traceback" not in program.stderr


def test_a_warning_in_a_job_of_slurm_saves_in_its_own_folder_and_leaves_the_job_to_its_script(training, tmp_path):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\ntouch {tmp_path}/requeued\n")
    scontrol.chmod(0o755)
    environment = {**SLURM, "PATH": f"{scontrol.parent}:/usr/bin:/bin"}
    program = training.start(tmp_path, at=Moment(STEP, 6, 9), number=signal.SIGUSR1, environment=environment)
    assert program.wait() == 85, program.stderr
    find_line(program.last_line, "preempted", 85)
    assert not (tmp_path / "requeued").exists()
    assert {path.name for path in tmp_path.rglob("*.ckpt")} == {"last.ckpt", "previous.ckpt"}
    assert read_training_state(runs(tmp_path)[-1])["global_step"] == 7


def test_all_ranks_stop_at_the_same_step_if_one_is_warned(training, tmp_path):
    pair = training.ranks(tmp_path, "--trainer.max_steps=30", at=Moment(STEP, 3, 9), number=signal.SIGUSR1)
    assert [rank.wait() for rank in pair] == [85, 85], pair[0].stderr + pair[1].stderr
    find_line(pair[0].stderr, "step 10", "--ckpt_path runs/digits")
    again = training.start(tmp_path, "--trainer.max_steps=12")
    assert again.wait() == 0, again.stderr
    assert goes_on_from(again) == 10


@pytest.fixture(scope="module")
def killed(training, tmp_path_factory):
    """Return a folder with a run that was killed in its tenth step."""
    folder = tmp_path_factory.mktemp("killed")
    assert training.start(folder, at=Moment(STEP, 9, 9)).wait() == -9
    return folder


def test_a_damaged_newest_checkpoint_and_half_a_line_cost_only_steps(training, killed, tmp_path, damage, seed):
    folder = tmp_path / "damaged"
    shutil.copytree(killed, folder)
    checkpoint, log = runs(folder)[-1] / "checkpoints" / "last.ckpt", runs(folder)[-1] / "metrics.csv"
    content = checkpoint.read_bytes()
    place = random.Random(f"{damage} {seed}").randrange(len(content))
    checkpoint.write_bytes(DAMAGES[damage](content, place))
    log.write_bytes(log.read_bytes()[:-9])
    again = training.start(folder)
    assert again.wait() == 0, again.stderr
    found = differences(runs(folder)[-1], training.undisturbed[0], goes_on_from(again))
    assert not found, f"{damage} at {place}: {found}"
    assert "warning: " in again.stdout + again.stderr
    assert goes_on_from(again) == 4


def test_a_kill_while_histories_are_cut_back_costs_nothing(training, killed, tmp_path):
    folder = tmp_path / "killed"
    shutil.copytree(killed, folder)
    assert training.start(folder, at=Moment("cut_rows", 0, 100)).wait() == -9
    again = training.start(folder)
    assert again.wait() == 0, again.stderr
    assert len(runs(folder)) == 1
    assert not differences(runs(folder)[-1], training.undisturbed[0], goes_on_from(again))


def test_a_run_folder_that_is_removed_is_one_line(training, tmp_path):
    program = training.start(tmp_path, at=Moment(STEP, 5, 9), number=signal.SIGSTOP).stopped()
    shutil.rmtree(tmp_path / "runs")
    program.send(signal.SIGCONT)
    assert program.wait() == 2, program.stderr
    assert program.last_line.startswith("error: cannot write"), program.last_line
    assert "Traceback" not in program.stderr
