"""One of two processes of encoding, sampling and evaluating is killed: the other ends soon, with one line."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from programs import Moment, Program, ranks
from small_programs import SmallPrograms, contents

SOON = 45  # seconds, on a busy machine
STRUCK = {  # where one rank is killed: on rank 1 in what both do, on rank 0 where only it writes
    "encode": [(1, Moment("write_shard", 1, 5)), (0, Moment("write_shard", 1, 5))],
    "sample into a folder": [(1, Moment("Samples.images", 0, 5)), (0, Moment("Samples.images", 1, 5))],
    "evaluate a checkpoint": [(1, Moment("Extraction._tensors", 15, 5)), (0, Moment("FeatureStore.add", 30, 5))],
}


def both(programs: SmallPrograms, name: str, folder: Path, **struck: object) -> list[Program]:
    """Start a program on two processes; `struck` has the options of the rank that it names."""
    return [
        programs.start(name, folder, environment=own, at=struck.get("at") if struck.get("rank") == rank else None)
        for rank, own in enumerate(ranks())
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", STRUCK)
def test_when_one_of_two_processes_is_killed_the_other_ends_and_both_go_on_together(
    small_programs, tmp_path, name, exhaustive, record_property
):
    if name != "evaluate a checkpoint" and not exhaustive:
        pytest.skip("a sample: --exhaustive tries all programs")
    expected, _ = small_programs.undisturbed(name, tmp_path / "undisturbed")
    for rank, moment in STRUCK[name] if exhaustive else STRUCK[name][:1]:
        folder = tmp_path / str(rank)
        pair = both(small_programs, name, folder, rank=rank, at=moment)
        assert pair[rank].wait() == -signal.SIGKILL, pair[rank].stderr
        start = time.monotonic()
        code = pair[1 - rank].wait(SOON)
        seconds = time.monotonic() - start
        again = both(small_programs, name, folder)
        codes = [program.wait() for program in again]
        good = codes == [0, 0] and contents(folder) == expected
        row = {"fault": "one of two processes killed, beside training", "tries": 1, "survived": int(good and code == 2)}
        record_property("fault", row | {"seconds to the end": seconds})
        assert code == 2, pair[1 - rank].stderr
        assert pair[1 - rank].last_line.startswith("error: "), pair[1 - rank].stderr
        assert codes == [0, 0], again[0].stderr + again[1].stderr
        assert contents(folder).keys() == expected.keys()
        assert good
        assert name != "encode" or "1 of 2" in again[0].stderr
