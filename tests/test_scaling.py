"""`python -m benchmarks.scaling`: its fits, its model of several devices, and a run whose figures mean nothing."""

import json

import pytest
from conftest import ROOT


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def test_a_fit_finds_the_coefficients_and_none_below_0():
    from benchmarks.scaling import fitted

    columns = [[1.0, 2.0, 5.0, 9.0], [1.0, 1.0, 1.0, 1.0]]
    assert fitted(columns, [3.0 * x + 7 for x in columns[0]], [10.0] * 4) == pytest.approx([3.0, 7.0])
    assert fitted(columns, [3.0 * x - 1 for x in columns[0]], [10.0] * 4)[1] == 0


def test_an_all_reduce_moves_each_byte_nearly_twice_over_the_slowest_link():
    from benchmarks.scaling import Accelerator, communication

    device = Accelerator(inside=100.0, between=50.0, machine=8, latency=0.5)
    assert communication(1000, 1, device) == 0
    assert communication(1000, 2, device) == 10 + 2 * 0.5
    assert communication(1000, 8, device) == 17.5 + 6 * 0.5
    assert communication(1000, 16, device) == 37.5 + 8 * 0.5


def test_a_quick_run_writes_its_rows(tmp_path, capsys):
    from benchmarks.scaling import main

    main(["--quick", "--only", "steps", "probes", "--json", str(tmp_path / "scaling.json")])
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert [row["cells"] for row in found["probes"]] == [2, 4]
    assert all(row["ms"] > 0 and row["predicted ms"] > 0 for part in found.values() for row in part)
    assert "| batch | image | depth | width |" in capsys.readouterr().out
