"""Runs compared layer by layer: the probes of evaluate.py and of training, means by hand, and what is refused."""

import csv
import json
import shutil

import pytest
import torch
from PIL import Image
from refusals import find_line, raises_user_error
from run_folders import a_run, compare, measurement, refused

from uvit_decay import plots
from uvit_decay.compare.differences import remarks
from uvit_decay.compare.layers import ChosenProbes
from uvit_decay.compare.runs import ENTROPY, KNN, NOISE_SHARE, PROBE, FinishedRun
from uvit_decay.nn.intermediates import Layer
from uvit_decay.representations.noise import NoiseTable
from uvit_decay.runs.history import PROBES, append

PROTOCOL = {"pool": "mean", "max_train": 8000, "noise_share": {"draws": 2}}
LAYERS = ("embeddings", "blocks.0", "blocks.1")
TIMES = (0.1, 0.3)


def accuracy(layer, t, shift):
    return 0.2 + 0.1 * layer - t / 2 + shift


def add_probes(run, shift=0.0, folder="probes_180", times=TIMES, ending="", **settings):
    """Write the table and the report of evaluate.py to a folder in a run folder."""
    place = run / folder
    place.mkdir()
    lines = [f"layer,name,kind,t,test_accuracy,knn_accuracy,spectrum_entropy{ending},noise_share"]
    for t in times:
        for i, name in enumerate(LAYERS):
            lines.append(f"{i},{name},encoder,{t},{accuracy(i, t, shift)},{0.1 * i},{i},{t + shift}")
    (place / "probes.csv").write_text("\n".join(lines) + "\n")
    report = {"protocol": {"checkpoint": str(run), "step": 180, **PROTOCOL, **settings}}
    (place / "probes.json").write_text(json.dumps(report))
    return run


@pytest.fixture
def arms(tmp_path):
    """Return the run folders of two arms and two seeds; the second arm is 0.04 and 0.06 better."""
    runs = []
    for number, (alpha, seed, shift) in enumerate([(1.0, 0, 0.0), (1.0, 1, 0.1), (0.7, 0, 0.04), (0.7, 1, 0.16)]):
        run = a_run(tmp_path, number, {}, metadata=None, alpha_min=alpha, seed=seed)
        runs.append(add_probes(run, shift))
    return runs


def test_means_over_layers_and_their_differences(arms, tmp_path, monkeypatch, capsys):
    flags = ["--x", "layer", "--layers", "1,blocks.1", "--times", "0.1", "--baseline", "1.0"]
    compare(monkeypatch, tmp_path, *arms, *flags)
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0].startswith("| alpha_min | runs | probe | kNN | entropy of the spectrum of mean ")
    find_line(shown.out, "| 1.0 | 2 | 0.350 +- 0.071 | 0.150 +- 0.000 |")
    find_line(shown.out, "| 0.7 | 2 | +0.050 +- 0.010 | +0.000 +- 0.000 |")
    find_line(shown.out, "step 180")
    find_line(shown.out, "1, 2", "t = 0.1")
    assert "| all |" not in shown.out
    assert shown.err == ""
    plain, decay, _ = csv.DictReader((tmp_path / "compare.csv").open())
    assert float(plain["probe_accuracy_mean"]) == pytest.approx(0.35)
    assert float(decay["probe_accuracy_difference"]) == pytest.approx(0.05)
    assert float(decay["tracked_noise_share_difference"]) == pytest.approx(0.05)
    assert Image.open(tmp_path / "compare.png").width > 800


def test_scores_are_drawn_over_the_layers_and_averaged_over_noise_levels(arms, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(plots, "_save", lambda figure, path: None)
    original = plots._final_curve

    def draw(axes, runs_at, key, colour):
        drawn.setdefault(key, []).append(runs_at)
        return original(axes, runs_at, key, colour)

    monkeypatch.setattr(plots, "_final_curve", draw)
    compare(monkeypatch, tmp_path, *arms, "--x", "layer")
    assert set(drawn) == {PROBE, KNN, ENTROPY, NOISE_SHARE}
    plain, decay = drawn[PROBE]
    assert list(plain) == [0, 1, 2]
    assert [scores[PROBE] for scores in plain[1]] == pytest.approx([0.2, 0.3])
    assert [scores[NOISE_SHARE] for scores in decay[2]] == pytest.approx([0.24, 0.36])


@pytest.mark.parametrize("report", [True, False])
def test_a_table_of_noise_shares_is_read(tmp_path, report):
    """With a report, as evaluate.py writes it; without one beside the history, as LinearProbes leaves it."""
    layers = {i: Layer(name, "encoder") for i, name in enumerate(LAYERS)}
    random = torch.Generator().manual_seed(0)
    scores = {name: torch.rand(2, 3, generator=random).double() for name in ("noise_share", "within_variance")}
    protocol = {"protocol": "noise-share", "noise": "draws", "seed": 0, **PROTOCOL}
    protocol["noise_share"] = {"images": 8, "draws": 2}
    metadata = {"weights": "ema", "step": 120, "checkpoint": "a.ckpt"}
    run = a_run(tmp_path, evaluations={}, metadata=None)
    NoiseTable(layers, TIMES, scores, protocol).save(run, "a run", metadata if report else None)
    if not report:
        append(run / PROBES, measurement(120, {"best_accuracy": 0.5}, protocol | {"tracked": "blocks.0", "best": {}}))
    found = ChosenProbes(times=[0.3]).read(run)
    assert found.step == 120
    assert found.times == (0.3,)
    ours = [found.by_layer[i]["noise_share"] for i in range(3)]
    assert ours == pytest.approx(scores["noise_share"][1].tolist(), rel=1e-5)
    assert found.protocol["noise_share.draws"] == 2
    assert not {"checkpoint", "step", "tracked", "best"} & set(found.protocol)


def test_the_tables_of_probes_and_noise_shares_are_joined(tmp_path):
    run = add_probes(a_run(tmp_path, metadata=None))
    table = run / "probes_180" / "noise_share.csv"
    lines = [f"{i},{name},encoder,{t},0.7" for t in TIMES for i, name in enumerate(LAYERS)]
    table.write_text("\n".join(["layer,name,kind,t,noise_share", *lines]))
    scores = ChosenProbes(times=(0.1,)).read(run).by_layer[1]
    assert (scores["noise_share"], scores["knn_accuracy"]) == pytest.approx((0.7, 0.1))


def test_ranks_of_class_tokens_are_named(tmp_path):
    run = FinishedRun.read(add_probes(a_run(tmp_path, metadata=None), ending="_of_cls"), ChosenProbes())
    assert run.ranked == "class tokens"
    assert run.last[ENTROPY] == 1.0


def test_probes_of_training_come_before_others_which_are_named(arms):
    run = arms[0]
    with raises_user_error("probes_60", "probes_180", "`probes`"):
        ChosenProbes().read(add_probes(run, 0.5, "probes_60"))
    assert ChosenProbes("probes_60").read(run).by_layer[0]["noise_share"] == pytest.approx(0.7)
    for name in ("probes.csv", "probes.json"):
        shutil.copy(run / "probes_180" / name, run)
    assert ChosenProbes().read(run).by_layer[0]["noise_share"] == pytest.approx(0.2)


def test_a_run_without_probes_is_told_the_command_that_measures_them(tmp_path):
    run = a_run(tmp_path / "my runs", evaluations={})
    with raises_user_error(f"--data '{run / 'config.yaml'}'", f"--out '{run / 'probes'}'"):
        ChosenProbes().read(run)


def test_other_protocols_and_layers_are_remarks(arms, tmp_path):
    other = add_probes(a_run(tmp_path, 9, {}, metadata=None, seed=3), max_train=100)
    table = other / "probes_180" / "probes.csv"
    table.write_text("".join(line for line in table.open() if "blocks.1" not in line))
    found = list(remarks([FinishedRun.read(run, ChosenProbes()) for run in (arms[2], other)]))
    assert len(found) == 2
    find_line(found, "max_train", 8000, 100)
    find_line(found, "0, 1, 2", "0, 1 in")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--layers", "blocks.7"], ("--layers", "blocks.7", "blocks.1")),
        (["--times", "0.2"], ("--times", "0.2", "0.1, 0.3")),
        (["--probes", "none"], ("--probes", "none", "probes.csv")),
        (["--x", "step", "--times", "0.1"], ("--times", "--x layer")),
    ],
)
def test_probes_that_are_not_there_are_refused(arms, tmp_path, monkeypatch, capsys, flags, named):
    line = refused(monkeypatch, capsys, tmp_path, arms[0], "--x", "layer", *flags)
    assert all(name in line for name in named)
    assert not (tmp_path / "compare.png").exists()


def test_runs_without_probes_and_at_other_noise_levels_are_refused(arms, tmp_path, monkeypatch, capsys):
    bare = a_run(tmp_path, 8, {}, alpha_min=0.5)
    assert "evaluate.py probe" in refused(monkeypatch, capsys, tmp_path, bare, "--x", "layer")
    other = add_probes(bare, times=(0.1,))
    assert "--times" in refused(monkeypatch, capsys, tmp_path, arms[0], other, "--x", "layer")
