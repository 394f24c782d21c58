"""Training that is killed or told to stop anywhere: the same command again ends as if nothing had been."""

from __future__ import annotations

import random
import signal
import time

import pytest
from programs import Moment
from small_training import PLACES, differences, goes_on_from, runs

CODES = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 85}
NAMES = {signal.SIGKILL: "kill -9", signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT", signal.SIGUSR1: "SIGUSR1"}
OFTEN = [signal.SIGKILL] * 4 + [signal.SIGTERM] * 2 + [signal.SIGINT] * 2 + [signal.SIGUSR1] * 2
FEW = [(place, signal.SIGKILL) for place in ("in a checkpoint", "between checkpoints' names", "in the metrics")]
FEW += [("in a new header of the log", signal.SIGTERM), ("in a step", signal.SIGUSR1)]
pytestmark = pytest.mark.slow


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        many = [(place, number) for number in OFTEN for place in PLACES]
        cases = many if metafunc.config.getoption("--exhaustive") else FEW
        names = [f"{NAMES[number]} {place} {seed}" for seed, (place, number) in enumerate(cases)]
        arguments = [(place, number, seed) for seed, (place, number) in enumerate(cases)]
        metafunc.parametrize(("place", "number", "seed"), arguments, ids=names)


def test_a_signal_anywhere_costs_no_result(training, tmp_path, place, number, seed, record_property):
    whole, calls = training.undisturbed
    draw, function = random.Random(seed), PLACES[place]
    entry = draw.randrange(len(calls[function]))
    at = Moment(function, entry, draw.randrange(calls[function][entry]))
    struck = training.run(tmp_path, at=at, number=number)
    begun = time.monotonic()
    again = training.run(tmp_path)
    lost = max(0, struck.steps - goes_on_from(again))
    found = differences(runs(tmp_path)[-1], whole, goes_on_from(again)) if again.wait() == 0 else [again.last_line]
    survived = not found and struck.wait() == CODES[number] and (number == signal.SIGKILL or not lost)
    name = f"training: {NAMES[number]} in one of {len(PLACES)} places"
    row = {"fault": name, "tries": 1, "survived": int(survived), "steps lost": lost}
    record_property("fault", row | {"seconds to the end": time.monotonic() - begun})
    assert struck.wait() == CODES[number], struck.stderr
    assert not found, f"{at}: {found}"
    assert lost <= 4 if number == signal.SIGKILL else not lost, f"{at}: {lost} steps lost"
    assert again.wait() == 0, again.stderr
