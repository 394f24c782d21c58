"""`python -m benchmarks`: its table and its JSON file, at sizes whose figures mean nothing."""

import json

import pytest
import torch
from conftest import ROOT

from uvit_decay.runtime.errors import UserError

FIELDS = {
    *("case", "precision", "compiled", "batch", "pairs", "seconds", "plain_seconds", "ratio", "flops", "mfu"),
    *("memory", "plain_memory", "difference", "tolerance"),
}


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def test_table_and_json_have_a_ratio_for_every_comparison(tmp_path, capsys):
    from benchmarks.__main__ import main

    path = tmp_path / "folder" / "bench.json"
    main(["--quick", "--only", "training", "loading", "--json", str(path)])
    table = capsys.readouterr().out
    written = json.loads(path.read_text())
    assert {"device", "versions", "threads", "date", "matrix_rate"} <= written["machine"].keys()
    assert {len(rows) for rows in written["groups"].values()} == {9, 3}
    for row in (row for rows in written["groups"].values() for row in rows):
        assert row.keys() == FIELDS
        low, median, high = row["ratio"].values()
        assert 0 < low <= median <= high
        shown = f"{row['precision']:18}", f"{median:.2f}", f"{low:.2f} .. {high:.2f}"
        assert any(all(part in line for part in (row["case"], *shown)) for line in table.splitlines())
        assert row["difference"] <= row["tolerance"]
        assert row["plain_seconds"]["low"] / row["seconds"]["high"] <= high
    steps = [row for row in written["groups"]["training"] if row["precision"] == "float32"]
    assert all(row["difference"] < 1e-5 and 0 < row["mfu"] < 1.5 for row in steps)


def test_a_ratio_of_different_results_is_refused():
    from benchmarks.cases import Agreement

    Agreement(1e-4, 1e-3).check("case")
    for wrong in (2e-3, float("nan")):
        with pytest.raises(UserError, match="case, .*cannot be compared"):
            Agreement(wrong, 1e-3).check("case, float32")


def test_flops_of_a_step_are_those_of_its_matrix_products():
    from benchmarks.measuring import model_flops

    x = torch.empty(3, 5, device="meta")
    weight = torch.empty(5, 7, device="meta", requires_grad=True)
    assert model_flops(lambda: (x @ weight).sum().backward()) == 2 * (2 * 3 * 5 * 7)
