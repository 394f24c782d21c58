"""Runs side by side: the table against numbers by hand, the curves, what is remarked and what is refused."""

import csv
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.figure import Figure
from PIL import Image
from refusals import find_line
from run_folders import METADATA, a_run, compare, configuration, measurement, refused, shift_evaluations

from uvit_decay import plots
from uvit_decay.compare.differences import remarks
from uvit_decay.compare.report import pearson
from uvit_decay.compare.runs import BEST, ENTROPY, MEAN_SHARE, NOISE_SHARE, FinishedRun, find_option, group_by_options
from uvit_decay.files.validation import flat
from uvit_decay.plots import _draw_curves
from uvit_decay.runs.history import GENERATION, append, read


@pytest.fixture
def four(tmp_path):
    """Return runs of two alphas and two seeds each."""
    plain = [a_run(tmp_path, s, shift_evaluations(0.02 * s), 14.0 + s, alpha_min=1.0, seed=s) for s in (0, 1)]
    return [*plain, *(a_run(tmp_path, 2 + s, shift_evaluations(0.1), alpha_min=0.7, seed=s) for s in (0, 1))]


def test_the_table_and_the_figure(four, tmp_path, monkeypatch, capsys):
    compare(monkeypatch, tmp_path, *four)
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[2].startswith("| 1.0 | 2 | 0.810 +- 0.014 | 0.820 +- 0.014 | 0.203 +- 0.004 | 4.010 +- 0.014 | 14.50 ")
    assert lines[3].startswith("| 0.7 | 2 | 0.900 +- 0.000 | 0.910 +- 0.000 | 0.225 +- 0.000 | 4.100 +- 0.000 | 12.00 ")
    assert lines[4].startswith("| all | 4 | - | - | - | - | - | - | 0.93 +- 0.00 | ")
    find_line(shown.out, "step 180")
    assert "samples 1000, weights ema, sampler dpm++, steps 12, guidance 2.0, against digits-train" in shown.out
    assert shown.err == ""
    assert Image.open(tmp_path / "compare.png").size == (888, 720)
    rows = list(csv.DictReader((tmp_path / "compare.csv").open()))
    assert [row["alpha_min"] for row in rows] == ["1.0", "0.7", "all"]
    assert float(rows[0]["best_accuracy_mean"]) == pytest.approx(np.mean([0.8, 0.82]))
    assert float(rows[0]["best_accuracy_std"]) == pytest.approx(np.std([0.8, 0.82], ddof=1), rel=1e-5)
    assert float(rows[0]["fd_std"]) == pytest.approx(np.std([14, 15], ddof=1), rel=1e-5)


def test_every_recorded_value_is_in_the_csv_and_the_table_says_what_it_leaves_out(tmp_path, monkeypatch, capsys):
    runs = [a_run(tmp_path, seed, top1=0.5 + seed / 10, alpha_min=alpha) for seed, alpha in enumerate((1.0, 0.7))]
    samples = {"fd": 12.0, "is": 2.0, "is_std": 0.1, "label_consistency": 0.75, "classifier_accuracy": 0.9, "mine": 3}
    for run in runs:
        append(run / GENERATION, measurement(200, samples, METADATA))
    compare(monkeypatch, tmp_path, *runs, "--baseline", "1.0")
    shown = capsys.readouterr().out
    assert "Label consistency |" in shown.splitlines()[0]
    assert "| 0.750 |" in shown.splitlines()[2]
    find_line(shown, "compare.csv", "classifier_accuracy", "is_std", "mine", "tracked_accuracy")
    rows = list(csv.DictReader((tmp_path / "compare.csv").open()))
    recorded = {"tracked_accuracy", "val/top1", *samples}
    for path in (run / "probes.jsonl", run / GENERATION):
        recorded.update(*(point.values for point in read(path)))
    assert {f"{name}_mean" for name in recorded} <= rows[0].keys()
    assert (rows[0]["mine_mean"], rows[1]["mine_difference"], rows[1]["val/top1_mean"]) == ("3", "0", "0.6")


def test_one_run_has_no_spread(tmp_path, monkeypatch, capsys):
    compare(monkeypatch, tmp_path, a_run(tmp_path), "--out", "figures/one.svg", "--x", "images")
    assert "| 0.7 | 1 | 0.800 | 0.810 | 0.200 | 4.000 | 12.00 | 2.00 | 0.93 | 0.93 |" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "figures" / "one.svg").read_text()


@pytest.mark.parametrize(
    ("ends", "words"),
    [([10], []), ([20], []), ([20, 20], ["thin", "thick"]), ([10, 20], ["thin", "thick", "shortest"])],
)
def test_a_legend_explains_lines_and_the_axis_of_a_single_evaluation_has_the_whole_training(ends, words, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    runs = [[{"step": step, "fid": 3.0} for step in range(10, end + 1, 10)] for end in ends]
    against = {("fid", "fid"): "Pearson's r = 1"}
    plots.learning_curves(Path("x.png"), {"0.7": runs}, "step", {"fid": "FID"}, against, "alpha_min", "digits")
    (figure,) = figures
    title = figure.legends[0].get_title().get_text()
    assert [word for word in ("thin", "thick", "shortest") if word in title] == words
    assert figure.get_suptitle() == "digits"
    left, _ = figure.axes[0].get_xlim()
    assert (left == 0) == (ends == [10])


@pytest.fixture
def drawn(monkeypatch):
    """Return the runs whose curves are drawn, by what they are of."""
    found = {}
    monkeypatch.setattr(
        plots, "_draw_curves", lambda axes, runs, x, key, colour: found.setdefault(key, []).extend(runs)
    )
    return found


def test_runs_with_fid_alone_have_curves_of_it(drawn, tmp_path, monkeypatch, capsys):
    runs = [a_run(tmp_path, i, {}, fid, alpha_min=alpha) for i, (fid, alpha) in enumerate(((12.0, 1.0), (14.0, 0.7)))]
    compare(monkeypatch, tmp_path, *runs)
    assert [[(point["step"], point["fd"]) for point in run] for run in drawn["fd"]] == [
        [(1, 99.0), (180, 12.0)],
        [(1, 99.0), (180, 14.0)],
    ]
    assert list(drawn) == ["fd", "is"]
    shown = capsys.readouterr()
    assert shown.out.splitlines()[:3] == [
        "| alpha_min | runs | FD (small-cnn) | Inception Score |",
        "| --- | --- | --- | --- |",
        "| 1.0 | 1 | 12.00 | 2.00 |",
    ]
    assert "| all |" not in shown.out  # without probes it has no correlation
    assert shown.err == ""
    monkeypatch.undo()
    for x in ("step", "alpha_min"):
        compare(monkeypatch, tmp_path, *runs, "--x", x, "--by", "seed_everything")


def test_runs_with_metrics_of_ones_own_alone_have_curves_of_them(drawn, tmp_path, monkeypatch):
    runs = [a_run(tmp_path, seed, {}, metadata=None, seed=seed) for seed in (0, 1)]
    for run in runs:
        append(run / GENERATION, measurement(180, {"mine": 3.0}, METADATA))
    compare(monkeypatch, tmp_path, *runs)
    assert list(drawn) == ["mine"]


def test_shares_are_columns_and_panels_and_a_collapse_into_the_mean_is_a_remark(drawn, tmp_path, monkeypatch, capsys):
    runs = []
    for i, (share, alpha) in enumerate(((0.99, 0.6), (0.42, 1))):
        runs.append(a_run(tmp_path, i, mean_share=share, noise_share=share / 2, alpha_min=alpha))
    compare(monkeypatch, tmp_path, *runs)
    shown = capsys.readouterr()
    assert "| share of the mean | noise share |" in shown.out.splitlines()[0]
    assert "| 0.990 | 0.495 |" in shown.out
    assert {MEAN_SHARE, NOISE_SHARE} < drawn.keys()
    find_line(shown.err, "0.95", runs[0])


def test_pearson_is_of_known_values_and_not_of_constant_or_few_ones(four):
    points = [point for folder in four for point in FinishedRun.read(folder).evaluations]
    assert np.isnan(pearson(points[:2]))
    assert np.isnan(pearson([{ENTROPY: 1.0, BEST: i / 10} for i in range(5)]))
    assert pearson([*points, {ENTROPY: float("nan"), BEST: 0.5}]) == pearson(points)


def test_the_history_is_read_whatever_its_order(tmp_path):
    folder = a_run(tmp_path)
    lines = (folder / "probes.jsonl").read_text().splitlines()
    (folder / "probes.jsonl").write_text("\n".join([lines[2], lines[0], lines[1]]))
    run = FinishedRun.read(folder)
    assert [point["step"] for point in run.evaluations] == [60, 120, 180]
    assert [point[BEST] for point in run.evaluations] == [0.5, 0.6, 0.8]
    assert [point["images"] for point in run.evaluations] == [60 * 32, 120 * 32, 180 * 32]
    assert [point["epoch"] for point in run.evaluations] == pytest.approx([60 / 44, 120 / 44, 180 / 44])
    assert run.last["fd"] == 12.0


def test_the_mean_is_of_the_steps_that_all_runs_looked_at():
    axes = Figure().add_subplot()
    runs = [[{"step": 1, "y": 1.0}, {"step": 2, "y": 2.0}], [{"step": 2, "y": 4.0}, {"step": 3, "y": 9.0}]]
    _draw_curves(axes, runs, "step", "y", colormaps["plasma"](0.5))
    *thin, mean = axes.lines
    assert [line.get_ydata().tolist() for line in thin] == [[1.0, 2.0], [4.0, 9.0]]
    assert (mean.get_xdata().tolist(), mean.get_ydata().tolist()) == ([2.0], [3.0])


def test_options_have_the_names_of_the_command_line():
    options = dict(flat(configuration()))
    assert options["model.net.alpha_min"] == 0.7
    assert options["trainer.callbacks.EMA.decay"] == 0.995
    assert options["trainer.callbacks.LinearProbes.times"] == [0.1, 0.2]
    twice = {"callbacks": [{"class_path": "a.B", "init_args": {"c": i}} for i in range(2)]}
    assert dict(flat(twice)) == {"callbacks.B.class_path": "a.B", "callbacks.B.c": 0} | {
        "callbacks.B1.class_path": "a.B",
        "callbacks.B1.c": 1,
    }


def test_any_option_compares(four, tmp_path):
    runs = [FinishedRun.read(folder) for folder in four]
    for by in ("alpha_min", "net.alpha_min", "model.init_args.net.init_args.alpha_min"):
        assert find_option(runs, by) == "model.net.alpha_min"
    assert find_option(runs, "net.schedule") == "model.net.schedule"
    assert list(group_by_options(runs, ["seed_everything"])) == [("1",), ("0",)]
    assert list(group_by_options(runs, ["model.net.schedule"])) == [("linear",)]


DIFFERENT = {
    ("data.batch_size", "32 in {0}", "64 in {1}"): {"batch_size": 64},
    ("180 in {0}", "120 in {1}"): {"evaluations": {60: (0.5, 1.0), 120: (0.6, 3)}},
    ("metrics", "n", "1000 in {0}", "500 in {1}"): {"metadata": {**METADATA, "n": 500}},
    ("metrics", "bins", "8 in {1}"): {"metadata": {**METADATA, "bins": 8, "measured_nfe": 24.0}},
    ("samples.guidance", "2.0 in {0}"): {"metadata": {**METADATA, "samples": {}}},
    ("metrics", "step", "in {1}"): {"at": 100},
    ("generation.jsonl", "{1}"): {"metadata": None},
    ("probes.jsonl", "{1}"): {"evaluations": {}, "earlier": 60},
    ("trainer.callbacks.LinearProbes.times", "[0.1, 0.2] in {0}"): {"probes": False},
    ("pool", "{0}", "class tokens in {1}"): {"pool": "cls"},
    ("seed 0, model.net.alpha_min 0.7", "2", "{0}, {1}"): {"seed": 0},
}


@pytest.mark.parametrize("named", DIFFERENT)
def test_what_differs_is_remarked(named, tmp_path):
    folders = [a_run(tmp_path), a_run(tmp_path, 1, **{"seed": 1, **DIFFERENT[named]})]
    runs = [FinishedRun.read(folder) for folder in folders]
    actual = list(remarks(runs, "model.net.alpha_min"))
    find_line(actual, *(fragment.format(*folders) for fragment in named))
    assert all(remark.count("\n") == 0 for remark in actual)
    several = ("trainer.callbacks.LinearProbes.times", "samples.guidance", "180 in {0}", "step")  # these differ in more
    assert len(actual) == 1 or not set(several).isdisjoint(named)


def test_wrong_runs_are_refused(tmp_path, monkeypatch, capsys):
    good = a_run(tmp_path)
    early = a_run(tmp_path, 1, {}, metadata=None)
    expected = {
        tmp_path / "nowhere": "config.yaml",
        good / "config.yaml": "config.yaml",
        good.parent.parent: "config.yaml",
        early: ("probes.jsonl", "generation.jsonl"),
    }
    for folder, words in expected.items():
        line = refused(monkeypatch, capsys, tmp_path, good, folder)
        find_line(line, words, folder)


LINE = '{"step": 3, "epoch": 0.1, "images_seen": 96, "values": {"fid": "low"}, "metadata": {}}'
DAMAGE = [
    ("config.yaml", "- 1", "dict"),
    ("probes.jsonl", "much", "line 1"),
    ("generation.jsonl", LINE, ("fid", "float")),
]


@pytest.mark.parametrize(("name", "content", "words"), DAMAGE)
def test_damaged_files_of_a_run_are_one_line_that_names_them(name, content, words, tmp_path, monkeypatch, capsys):
    run = a_run(tmp_path)
    (run / name).write_text(content)
    find_line(refused(monkeypatch, capsys, tmp_path, run), run / name, words)
    assert not (tmp_path / "compare.csv").exists()


def test_an_experiment_stands_for_its_newest_training_not_for_a_validation(tmp_path):
    run = a_run(tmp_path)
    (run / "checkpoints").mkdir()
    validation = run.with_name("version_7")
    validation.mkdir()
    (validation / "config.yaml").write_text((run / "config.yaml").read_text())
    assert FinishedRun.read(run.parent).folder == run


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--by", "alpha"], ("--by", "alpha")),
        (["--x", "depth"], ("--x", "depth")),
        (["--x", "alpha_min"], ("--x alpha_min", "--by")),
        (["--rank", "mean"], "--rank"),
        (["--by", "schedule"], "model.net.schedule, model.optim.schedule"),
        (["--out", "x.csv"], ".png"),
    ],
)
def test_wrong_options_are_refused(args, words, tmp_path, monkeypatch, capsys):
    run = a_run(tmp_path)
    find_line(refused(monkeypatch, capsys, tmp_path, run, *args), words)
