"""What a kill or a power failure leaves of a run's files, and a run folder that is removed while the run lasts."""

from __future__ import annotations

import random
import shutil
import signal
import time

import pytest
from programs import Moment
from small_training import differences, goes_on_from, runs

STEP = "Task.optimizer_step"
pytestmark = pytest.mark.slow


def zeroed(content: bytes, place: int) -> bytes:
    return content[:place] + bytes(len(content) - place)


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES = {"truncated": lambda content, place: content[:place], "zeroed tail": zeroed, "flipped byte": flipped}


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        count = 8 if metafunc.config.getoption("--exhaustive") else 1
        cases = [(name, seed) for seed in range(count) for name in DAMAGES]
        metafunc.parametrize(("damage", "seed"), cases if count > 1 else [("zeroed tail", 0)])


@pytest.fixture(scope="module")
def killed(training, tmp_path_factory):
    """A folder with a run that was killed in its tenth step."""
    folder = tmp_path_factory.mktemp("killed")
    assert training.run(folder, at=Moment(STEP, 9, 9)).wait() == -9
    return folder


def test_a_damaged_newest_checkpoint_and_half_a_line_cost_only_steps(
    training, killed, tmp_path, damage, seed, record_property
):
    folder = tmp_path / "damaged"
    shutil.copytree(killed, folder)
    checkpoint, log = runs(folder)[-1] / "checkpoints" / "last.ckpt", runs(folder)[-1] / "metrics.csv"
    content = checkpoint.read_bytes()
    place = random.Random(f"{damage} {seed}").randrange(len(content))
    checkpoint.write_bytes(DAMAGES[damage](content, place))
    log.write_bytes(log.read_bytes()[:-9])
    begun = time.monotonic()
    again = training.run(folder)
    found = (
        differences(runs(folder)[-1], training.undisturbed[0], goes_on_from(again))
        if again.wait() == 0
        else [again.last_line]
    )
    lost = 10 - goes_on_from(again)
    row = {"fault": f"newest checkpoint: {damage}", "tries": 1, "survived": int(not found), "steps lost": lost}
    record_property("fault", row | {"seconds to the end": time.monotonic() - begun})
    assert not found, f"{damage} at {place}: {found}"
    assert "warning: " in again.stdout + again.stderr
    assert lost == 6


def test_a_run_folder_that_is_removed_is_one_line(training, tmp_path):
    program = training.start(tmp_path, at=Moment(STEP, 5, 9), number=signal.SIGSTOP)
    program.wait_until_stopped()
    shutil.rmtree(tmp_path / "runs")
    program.send(signal.SIGCONT)
    assert program.wait() == 2, program.stderr
    assert program.last_line.startswith("error: cannot write"), program.last_line
    assert "Traceback" not in program.stderr
