"""One of two ranks is killed: the other ends soon with one line, and the same command resumes."""

from __future__ import annotations

import signal
import time

import pytest
from programs import Moment
from small_training import equal, goes_on_from, rows, runs, trained

STEP, PROBES = "Task.optimizer_step", "LinearProbes.evaluate"
LONGEST = 60  # seconds after which the other rank has ended, on a busy machine
KILLS = {
    "kill -9 in a step": (signal.SIGKILL, STEP, 6),
    "SIGSEGV in a step": (signal.SIGSEGV, STEP, 9),
    "kill -9 in the probes": (signal.SIGKILL, PROBES, 0),
    "SIGABRT in a step": (signal.SIGABRT, STEP, 4),
}
pytestmark = pytest.mark.slow


def pytest_generate_tests(metafunc):
    if "kill" in metafunc.fixturenames:
        metafunc.parametrize("kill", KILLS if metafunc.config.getoption("--exhaustive") else [*KILLS][:1])


@pytest.fixture(scope="module")
def whole(training, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert [rank.wait() for rank in training.ranks(folder)] == [0, 0]
    return runs(folder)[-1]


def test_the_other_rank_ends_and_the_run_goes_on(training, whole, tmp_path, kill, record_property):
    number, function, entry = KILLS[kill]
    alive, killed = training.ranks(tmp_path, at=Moment(function, entry, 50), number=number)
    assert killed.wait() == -number, killed.stderr
    begun = time.monotonic()
    code = alive.wait(LONGEST)
    seconds, steps = time.monotonic() - begun, killed.steps
    again = training.ranks(tmp_path)
    codes = [rank.wait() for rank in again]
    run, lost = runs(tmp_path)[-1], max(0, steps - goes_on_from(again[0]))
    same = codes == [0, 0] and all(row in rows(whole) for row in rows(run)) and equal(trained(run), trained(whole))
    row = {"fault": f"one of two ranks: {kill}", "tries": 1, "survived": int(same and code == 2), "steps lost": lost}
    record_property("fault", row | {"seconds to the end": seconds})
    assert code == 2, alive.stderr
    assert alive.last_line.startswith("error: "), alive.last_line
    assert same, again[0].stderr
