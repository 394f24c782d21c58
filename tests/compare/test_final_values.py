"""Runs compared over a second option, runs of encoders, and the choice of the rank."""

import csv

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from refusals import find_line
from run_folders import a_run, compare, shift_evaluations

from uvit_decay.compare.differences import remarks
from uvit_decay.compare.report import pearson
from uvit_decay.compare.runs import BEST, EFFECTIVE_RANK, FinishedRun, group_by_options
from uvit_decay.plots import _final_curve


@pytest.fixture
def eight(tmp_path):
    """Return runs of classifiers of two alphas, two widths and two seeds each."""
    settings = [(alpha, dim, seed) for alpha in (1.0, 0.7) for dim in (8, 16) for seed in (0, 1)]
    runs = []
    for alpha, dim, seed in settings:
        options = {"effective_rank": True, "top1": 0.9 - 0.1 * seed, "alpha_min": alpha, "dim": dim, "seed": seed}
        evaluations = shift_evaluations(0.01 * seed + 0.1 * alpha)
        runs.append(a_run(tmp_path, len(runs), evaluations, metadata=None, **options))
    return runs


def test_the_table_has_a_row_for_both_options_and_no_empty_columns(eight, tmp_path, monkeypatch, capsys):
    compare(monkeypatch, tmp_path, *eight, "--x", "dim")
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0] == (
        "| alpha_min | dim | runs | top-1 | best probe | best on test | kNN "
        "| entropy of the spectrum of mean patch tokens | effective rank of mean patch tokens "
        "| r within runs | r over all evaluations |"
    )
    places = [line.split(" | ")[:3] for line in lines[2:6]]
    assert places == [["| 1.0", "8", "2"], ["| 1.0", "16", "2"], ["| 0.7", "8", "2"], ["| 0.7", "16", "2"]]
    assert lines[2].startswith("| 1.0 | 8 | 2 | 0.850 +- 0.071 | 0.905 +- 0.007 | 0.915 +- 0.007 | 0.226 ")
    assert lines[6].startswith("| all |  | 8 | - | ")
    assert "FID" not in shown.out
    assert shown.err == ""
    rows = list(csv.DictReader((tmp_path / "compare.csv").open()))
    assert [(row["alpha_min"], row["dim"]) for row in rows][:2] == [("1.0", "8"), ("1.0", "16")]
    assert float(rows[0]["val/top1_mean"]) == pytest.approx(0.85)
    assert float(rows[0]["tracked_effective_rank_exp_mean"]) == pytest.approx(10 - (4.0 + 0.105))
    assert Image.open(tmp_path / "compare.png").size == (888, 720)
    compare(monkeypatch, tmp_path, *eight, "--x", "net.schedule", "--out", "words.svg")
    drawn = (tmp_path / "words.svg").read_text()
    assert "linear" in drawn
    assert "8 runs" in drawn


def test_a_curve_goes_through_means_with_bars_of_the_spread():
    axes = Figure().add_subplot()
    runs = {8.0: [{"y": 1.0}, {"y": 3.0}], 16.0: [{"y": 5.0}, {"y": float("nan")}, {}], 32.0: [{"other": 1.0}]}
    line, caps, (bars,) = _final_curve(axes, runs, "y", (0.0, 0.0, 0.0, 1.0))
    assert line.get_xydata().tolist() == [[8.0, 2.0], [16.0, 5.0]]
    heights = [segment[:, 1] for segment in bars.get_segments()]
    assert np.ptp(heights[0]) == pytest.approx(2 * 2**0.5)
    assert np.ptp(heights[1]) == 0.0
    drawn = sorted(point for dots in axes.collections[:2] for point in dots.get_offsets().tolist())
    assert drawn == [[8.0, 1.0], [8.0, 3.0], [16.0, 5.0]]


def test_further_options_ascend(eight):
    runs = [FinishedRun.read(folder) for folder in eight]
    groups = group_by_options(runs, ["model.net.dim", "model.net.alpha_min", "seed_everything"])
    assert list(groups)[:3] == [("16", "0.7", "0"), ("16", "0.7", "1"), ("16", "1.0", "0")]
    assert all(len(group) == 1 for group in groups.values())


def test_the_rank_that_is_drawn_is_that_which_is_correlated(eight, tmp_path, monkeypatch, capsys):
    points = [point for folder in eight for point in FinishedRun.read(folder).evaluations]
    expected = np.corrcoef([point[EFFECTIVE_RANK] for point in points], [point[BEST] for point in points])[0, 1]
    assert pearson(points, EFFECTIVE_RANK) == pytest.approx(expected)
    assert pearson(points, EFFECTIVE_RANK) == pytest.approx(-pearson(points))
    compare(monkeypatch, tmp_path, *eight, "--rank", "effective")
    shown = capsys.readouterr().out
    find_line(shown, "correlation", "effective rank", "accuracy")
    assert f" {expected:.2f} |" in shown.splitlines()[4]


def test_ranks_of_class_tokens_are_read(tmp_path):
    pooled, of_class = (a_run(tmp_path, i, effective_rank=True, metadata=None) for i in range(2))
    file = of_class / "probes.jsonl"
    text = file.read_text().replace("_effective_rank_exp", "_effective_rank_exp_of_cls")
    file.write_text(text.replace("_spectrum_entropy", "_spectrum_entropy_of_cls"))
    assert FinishedRun.read(of_class).last == FinishedRun.read(pooled).last
    assert [FinishedRun.read(run).ranked for run in (pooled, of_class)] == ["mean patch tokens", "class tokens"]


def test_an_absent_option_of_an_older_run_is_its_default(tmp_path):
    runs = [a_run(tmp_path, i, seed=i) for i in range(2)]
    text = (runs[0] / "config.yaml").read_text()
    (runs[0] / "config.yaml").write_text(text.replace("schedule: linear", "schedule: linear\n        newer: 3"))
    assert list(remarks([FinishedRun.read(run) for run in runs], "model.net.alpha_min")) == []
