"""Files that were damaged or made to harm: each is read as it was written, or refused in one line, at a bound."""

import sys

import pytest
from cases import Outcome, run
from image_kinds import IMAGE_KINDS
from kind import Sources
from tensor_kinds import TENSOR_KINDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and measures by /proc")
KINDS = {**TENSOR_KINDS, **IMAGE_KINDS}
SEED, NORMAL, EXHAUSTIVE = 0, 120, 5000  # cases over all kinds


@pytest.fixture(scope="session")
def sources(trained, encoded, vae):
    return Sources(trained, encoded, vae)


def share(total, name):
    """The numbers of the cases of a kind, evenly over all kinds."""
    index, count = list(KINDS).index(name), len(KINDS)
    return range(total // count + (index < total % count))


def table_row(name, outcomes: list[Outcome]):
    """What the table of `make faults` shows of a kind."""
    results = [outcome.result for outcome in outcomes]
    return {
        "file": name,
        "cases": len(outcomes),
        "as written": results.count("same"),
        "another valid": results.count("other"),
        "refused": results.count("refused"),
        "slowest ms": round(max(outcome.milliseconds for outcome in outcomes)),
        "peak MB": round(max(outcome.megabytes for outcome in outcomes)),
    }


@pytest.mark.parametrize("name", KINDS)
def test_a_changed_file_is_read_right_or_refused(name, sources, tmp_path, request, record_property):
    template = tmp_path / "template"
    template.mkdir()
    KINDS[name].make(template, sources)
    total = EXHAUSTIVE if request.config.getoption("--exhaustive", False) else NORMAL
    outcomes = run(KINDS[name], name, template, SEED, share(total, name))
    record_property("fuzz", table_row(name, outcomes))
    failures = [f"{name} {outcome.number}: {outcome.reason}" for outcome in outcomes if outcome.result == "failed"]
    assert not failures, "\n" + "\n".join(failures)
