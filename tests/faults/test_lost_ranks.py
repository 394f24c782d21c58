"""One of two processes is killed: the other ends soon, with one line, and the same command goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from programs import Moment, Program, ranks
from small_programs import SmallPrograms, contents
from small_training import STEP, equal, goes_on_from, read_training_state, rows, runs

SOON = 60  # seconds after which the other one has ended, on a busy machine
KILLS = {
    "kill -9 in a step": (signal.SIGKILL, STEP, 6),
    "SIGSEGV in a step": (signal.SIGSEGV, STEP, 9),
    "kill -9 in the probes": (signal.SIGKILL, "LinearProbes.evaluate", 0),
    "SIGABRT in a step": (signal.SIGABRT, STEP, 4),
}
STRUCK = {  # where one rank is killed: on rank 1 in what both do, on rank 0 where only it writes
    "encode": [(1, Moment("write_shard", 1, 5)), (0, Moment("write_shard", 1, 5))],
    "sample into a folder": [(1, Moment("Samples.images", 0, 5)), (0, Moment("Samples.images", 1, 5))],
    "evaluate a checkpoint": [(1, Moment("Extraction._extract", 15, 5)), (0, Moment("FeatureStore.add", 30, 5))],
}
pytestmark = pytest.mark.slow


def pytest_generate_tests(metafunc):
    if "kill" in metafunc.fixturenames:
        metafunc.parametrize("kill", KILLS if metafunc.config.getoption("--exhaustive") else [*KILLS][:1])


def ends(alive: Program) -> None:
    """Check that the one that was not killed ends soon, with one line."""
    assert alive.wait(SOON) == 2, alive.stderr
    assert alive.last_line.startswith("error: "), alive.stderr


@pytest.fixture(scope="module")
def whole(training, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert [rank.wait() for rank in training.ranks(folder)] == [0, 0]
    return runs(folder)[-1]


def test_when_a_rank_of_training_is_killed_the_other_ends_and_the_run_goes_on(training, whole, tmp_path, kill):
    number, function, entry = KILLS[kill]
    alive, killed = training.ranks(tmp_path, at=Moment(function, entry, 50), number=number)
    assert killed.wait() == -number, killed.stderr
    ends(alive)
    again = training.ranks(tmp_path)
    assert [rank.wait() for rank in again] == [0, 0], again[0].stderr
    assert killed.steps - goes_on_from(again[0]) <= 4
    run = runs(tmp_path)[-1]
    assert all(row in rows(whole) for row in rows(run))
    assert equal(read_training_state(run), read_training_state(whole))


def both(programs: SmallPrograms, name: str, folder: Path, **struck: object) -> list[Program]:
    """Start a program on two processes; `struck` has the options of the rank that it names."""
    return [
        programs.start(name, folder, environment=own, at=struck.get("at") if struck.get("rank") == rank else None)
        for rank, own in enumerate(ranks())
    ]


@pytest.mark.parametrize("name", STRUCK)
def test_when_one_process_is_killed_the_other_ends_and_both_go_on(small_programs, tmp_path, name, exhaustive):
    if name != "evaluate a checkpoint" and not exhaustive:
        pytest.skip("a sample: --exhaustive tries all programs")
    expected, _ = small_programs.undisturbed(name, tmp_path / "undisturbed")
    for rank, moment in STRUCK[name] if exhaustive else STRUCK[name][:1]:
        folder = tmp_path / str(rank)
        pair = both(small_programs, name, folder, rank=rank, at=moment)
        assert pair[rank].wait() == -signal.SIGKILL, pair[rank].stderr
        ends(pair[1 - rank])
        again = both(small_programs, name, folder)
        assert [program.wait() for program in again] == [0, 0], again[0].stderr + again[1].stderr
        assert contents(folder) == expected
        assert name != "encode" or "1 of 2" in again[0].stderr
