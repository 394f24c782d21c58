"""Runs side by side: the table against numbers by hand, the curves, what is remarked and what is refused."""

import csv
import json
import runpy
import sys

import numpy as np
import pytest
import yaml
from conftest import ROOT, run_script
from matplotlib import colormaps
from matplotlib.figure import Figure
from PIL import Image

from uvit_decay.callbacks import RunLogger
from uvit_decay.compare.report import axis, grouped, option, pearson, remarks
from uvit_decay.compare.runs import BEST, KEYS, KNN, ON_TEST, RANK, WATCHED, Run, steps_in_epoch
from uvit_decay.plots import _curves
from uvit_decay.runtime.plain import flat

LOOKS = {60: (0.5, 1.0), 120: (0.6, 3.0), 180: (0.8, 4.0)}  # step: (accuracy, effective rank)
ENTRY = {
    "step": 180,
    "fid": 12.0,
    "is": 2.0,
    "n": 1000,
    "samples": {"name": "samples", "weights": "ema", "sampler": "dpm++", "steps": 12, "guidance": 2.0},
    "reference": {"name": "digits-train"},
    "extractor": "small-cnn",
}


def configuration(alpha_min=0.7, seed=0, probes=True, batch_size=32, ckpt_path=None):
    """What train.py saves, in short."""
    net = {"class_path": "uvit_decay.nn.UViT", "init_args": {"alpha_min": alpha_min, "schedule": "linear", "dim": 64}}
    callbacks = [{"class_path": "uvit_decay.callbacks.EMA", "init_args": {"decay": 0.995}}]
    if probes:
        callbacks.append({"class_path": "uvit_decay.callbacks.LinearProbes", "init_args": {"times": [0.1, 0.2]}})
    return {
        "seed_everything": seed,
        "trainer": {"accumulate_grad_batches": 1, "callbacks": callbacks, "logger": {"init_args": {"version": None}}},
        "model": {"init_args": {"net": net, "optim": {"lr": 0.003, "schedule": "cosine"}}},
        "data": {"class_path": "uvit_decay.data.Digits", "init_args": {"batch_size": batch_size}},
        "ckpt_path": ckpt_path,
    }


def a_run(folder, version=0, looks=LOOKS, entry=ENTRY, epoch_steps=44, **options):
    """A run folder whose metrics.csv our logger wrote, as Lightning calls it: losses have epochs, looks have none."""
    logger = RunLogger("digits", save_dir=str(folder), version=version)
    for step in range(19, max(looks, default=100), 20):
        logger.log_metrics({"train/loss": 1 / (step + 1), "epoch": step // epoch_steps}, step)
        logger.save()
    for step, (accuracy, rank) in looks.items():
        values = {BEST: accuracy, ON_TEST: accuracy + 0.01, WATCHED: accuracy / 2, KNN: accuracy / 4, RANK: rank}
        logger.log_metrics(values, step)
        logger.save()
    logger.log_metrics({"val/loss": 0.1, "epoch": 3}, 180)
    logger.finalize("success")
    run = folder / "digits" / f"version_{version}"
    (run / "config.yaml").write_text("# lightning.pytorch==2.6\n" + yaml.safe_dump(configuration(**options)))
    if entry is not None:
        (run / "generation.json").write_text(json.dumps([{**entry, "step": 1, "fid": 99.0}, entry]))
    return run


def shifted(by):
    return {step: (accuracy + by, rank + by) for step, (accuracy, rank) in LOOKS.items()}


@pytest.fixture
def four(tmp_path):
    """Two alphas, two seeds each."""
    plain = [a_run(tmp_path, s, shifted(0.02 * s), {**ENTRY, "fid": 14.0 + s}, alpha_min=1.0, seed=s) for s in (0, 1)]
    return [*plain, *(a_run(tmp_path, 2 + s, shifted(0.1), alpha_min=0.7, seed=s) for s in (0, 1))]


def compare(monkeypatch, folder, *args):
    """`python -m uvit_decay.compare compare ...` in this process, in `folder`."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["uvit_decay.compare", "compare", *map(str, args)])
    runpy.run_module("uvit_decay.compare", run_name="__main__")


def refused(monkeypatch, capsys, folder, *args):
    """The one line that it ends with."""
    with pytest.raises(SystemExit) as end:
        compare(monkeypatch, folder, *args)
    assert end.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


def test_the_table_and_the_figure(four, tmp_path, monkeypatch, capsys):
    compare(monkeypatch, tmp_path, *four)
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[2].startswith("| 1.0 | 2 | 0.810 +- 0.014 | 0.820 +- 0.014 | 0.203 +- 0.004 | 4.010 +- 0.014 | 14.50 ")
    assert lines[3].startswith("| 0.7 | 2 | 0.900 +- 0.000 | 0.910 +- 0.000 | 0.225 +- 0.000 | 4.100 +- 0.000 | 12.00 ")
    assert lines[4].startswith("| all | 4 | - | - | - | - | - | - | 0.93 +- 0.00 | ")
    assert "Last look at step 180" in shown.out
    assert "samples 1000, weights ema, sampler dpm++, steps 12, guidance 2.0, against digits-train" in shown.out
    assert shown.err == ""
    assert Image.open(tmp_path / "compare.png").size == (1200, 350)
    rows = list(csv.DictReader((tmp_path / "compare.csv").open()))
    assert [row["alpha_min"] for row in rows] == ["1.0", "0.7", "all"]
    assert float(rows[0]["best_accuracy_mean"]) == pytest.approx(np.mean([0.8, 0.82]))
    assert float(rows[0]["best_accuracy_std"]) == pytest.approx(np.std([0.8, 0.82], ddof=1), rel=1e-5)
    assert float(rows[0]["fid_std"]) == pytest.approx(np.std([14, 15], ddof=1), rel=1e-5)


def test_one_run_has_no_spread(tmp_path, monkeypatch, capsys):
    compare(monkeypatch, tmp_path, a_run(tmp_path), "--out", "figures/one.svg", "--x", "images")
    assert "| 0.7 | 1 | 0.800 | 0.810 | 0.200 | 4.000 | 12.00 | 2.00 | 0.93 | 0.93 |" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "figures" / "one.svg").read_text()


def test_pearson_is_numpys(four):
    looks = [look for folder in four for look in Run.read(folder).looks]
    wanted = np.corrcoef([look[RANK] for look in looks], [look[BEST] for look in looks])[0, 1]
    assert pearson(looks) == pytest.approx(wanted)
    assert np.isnan(pearson(looks[:2]))
    assert np.isnan(pearson([{RANK: 1.0, BEST: i / 10} for i in range(5)]))
    assert pearson([*looks, {RANK: float("nan"), BEST: 0.5}]) == pytest.approx(wanted)


def test_the_log_is_read_whatever_its_order_and_its_gaps(tmp_path):
    run = Run.read(a_run(tmp_path, looks={180: (0.8, 4.0), 60: (0.5, 1.0), 120: (0.6, 3.0)}))
    assert [look["step"] for look in run.looks] == [60, 120, 180]
    assert [look[BEST] for look in run.looks] == [0.5, 0.6, 0.8]
    assert all(not np.isnan(look[key]) for look in run.looks for key in KEYS)
    assert [look["images"] for look in run.looks] == [60 * 32, 120 * 32, 180 * 32]
    assert run.last["fid"] == 12.0


def test_half_a_line_is_not_read(tmp_path):
    """A run that goes on is writing it: its numbers would be cut off."""
    folder = a_run(tmp_path)
    content = (folder / "metrics.csv").read_bytes()
    end = content.index(b"\r\n", content.index(b"0.8"))  # of the line of the last look
    (folder / "metrics.csv").write_bytes(content[: end - 1])
    assert [look["step"] for look in Run.read(folder).looks] == [60, 120]


@pytest.mark.parametrize("steps", [1, 7, 44, 390, 1251])
def test_the_steps_of_an_epoch_are_those_of_the_log(steps):
    rows = [{"train/loss": "1", "epoch": str(s // steps), "step": str(s)} for s in range(19, 30 * steps + 40, 20)]
    assert steps_in_epoch(rows) == pytest.approx(steps, rel=0.05)
    assert np.isnan(steps_in_epoch([row for row in rows if row["epoch"] == "0"]))


def test_curves_are_over_epochs_where_they_are_known(tmp_path):
    known, unknown = Run.read(a_run(tmp_path)), Run.read(a_run(tmp_path, 1, epoch_steps=1000))
    assert [look["epoch"] for look in known.looks] == pytest.approx([60 / 44, 120 / 44, 180 / 44], rel=0.05)
    assert axis([known], None) == "epoch"
    assert axis([known, unknown], None) == "step"


def test_the_mean_is_of_the_steps_that_all_runs_looked_at():
    axes = Figure().add_subplot()
    runs = [[{"step": 1, "y": 1.0}, {"step": 2, "y": 2.0}], [{"step": 2, "y": 4.0}, {"step": 3, "y": 9.0}]]
    _curves(axes, runs, "step", "y", colormaps["plasma"](0.5))
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
    runs = [Run.read(folder) for folder in four]
    for by in ("alpha_min", "net.alpha_min", "model.init_args.net.init_args.alpha_min"):
        assert option(runs, by) == "model.net.alpha_min"
    assert option(runs, "net.schedule") == "model.net.schedule"
    assert list(grouped(runs, "seed_everything")) == ["1", "0"]
    assert list(grouped(runs, "model.net.schedule")) == ["linear"]


DIFFERENT = {
    "data.batch_size differs: 32 in {0}; 64 in {1}": {"batch_size": 64},
    "the step of the last look differs: 180 in {0}; 120 in {1}": {"looks": {60: (0.5, 1.0), 120: (0.6, 3.0)}},
    "FID's n differs: 1000 in {0}; 500 in {1}": {"entry": {**ENTRY, "n": 500}},
    "FID's samples.guidance differs: 2.0 in {0}; absent in {1}": {"entry": {**ENTRY, "samples": {}}},
    "FID is not of the step of the last look in {1}": {"entry": {**ENTRY, "step": 100}},
    "no generation.json, so no FID, in {1}": {"entry": None},
    "seed 0, model.net.alpha_min 0.7 is there 2 times, so the spread is not that of seeds: {0}, {1}": {"seed": 0},
    "{1} went on from a/last.ckpt: earlier looks are in the folder of that run": {"ckpt_path": "a/last.ckpt"},
}


@pytest.mark.parametrize("line", DIFFERENT)
def test_what_differs_is_remarked(line, tmp_path):
    folders = [a_run(tmp_path), a_run(tmp_path, 1, **{"seed": 1, **DIFFERENT[line]})]
    runs = [Run.read(folder) for folder in folders]
    found = list(remarks(runs, "model.net.alpha_min"))
    assert line.format(*folders) in found
    assert all(remark.count("\n") == 0 for remark in found)
    assert len(found) == 1 or "FID's samples" in line or "last look" in line


def test_a_remark_names_few_runs(four, tmp_path):
    runs = [Run.read(folder) for folder in [*four, a_run(tmp_path, 9, seed=7, batch_size=8)]]
    assert list(remarks(runs, "model.net.alpha_min")) == [
        f"data.batch_size differs: 32 in 4 runs; 8 in {runs[-1].folder}"
    ]


def test_wrong_runs_are_refused(tmp_path, monkeypatch, capsys):
    good = a_run(tmp_path)
    early, silent = a_run(tmp_path, 1, {}), a_run(tmp_path, 2, {}, probes=False)
    unlogged, broken = a_run(tmp_path, 3), a_run(tmp_path, 4)
    (unlogged / "metrics.csv").unlink()
    (broken / "metrics.csv").write_text(f"step,{BEST}\n10,much\n")
    wanted = {
        tmp_path / "nowhere": "is not there",
        good / "config.yaml": "is a file",
        good.parent: f"is no run folder: name one of its runs, such as {good}",
        early: "has not looked at its probes yet",
        unlogged: "has not looked at its probes yet",
        silent: "logs no probes: add the callback LinearProbes",
        broken: "metrics.csv is damaged: could not convert string to float: 'much'",
    }
    for folder, words in wanted.items():
        line = refused(monkeypatch, capsys, tmp_path, good, folder)
        assert words in line
        assert str(folder) in line
    (broken / "config.yaml").write_text("a: [")
    assert "cannot read" in refused(monkeypatch, capsys, tmp_path, broken)
    (good / "generation.json").write_text("[]")
    assert "generation.json" in refused(monkeypatch, capsys, tmp_path, good)
    assert not (tmp_path / "compare.csv").exists()


DAMAGE = {
    "config.yaml": {
        "a: &a {b: [*a]}": "cannot read",
        "- 1": "must be dict",
        "3: 4": "must be str",
        "data: {batch_size: much}": "data.batch_size must be int, it is 'much'",
        "data: {batch_size: 3}\ntrainer: {accumulate_grad_batches: [1]}": "accumulate_grad_batches must be int",
    },
    "metrics.csv": {
        f"stap,epoch,train/loss,{BEST}\n10,1,0.5,0.5\n": "invalid literal for int",
        f"step,{BEST}\n10,much\n": "could not convert string to float: 'much'",
        f"step,{BEST}\nnan,0.5\n": "invalid literal",
        f"step,{BEST}\n{'9' * 400},0.5\n": "too large",
        f"step,{BEST}\n-3,0.5\n": "step -3.0",
        f"step,{BEST}\n3,1e999\n": f"{BEST} inf",
        f"step,{BEST}\n3,-0.5\n": f"{BEST} -0.5",
        f"step,{BEST},epoch,train/loss\n3,0.5,-1,1\n": "division",
        f"step,{BEST}\n3,{'x' * 200_000}\n": "field larger",
    },
    "generation.json": {
        "[]": "has no entry",
        "{}": "must be list",
        "[3]": r"[0] must be dict",
        '[{"step": 1, "fid": "low"}]': "fid must be float, it is 'low'",
        '[{"step": 1, "fid": NaN}]': "fid must be float",
        '[{"step": "x"}]': "step must be int",
        '[{"samples": [1]}]': "samples must be dict",
        '[{"n": 1.5}]': "n must be int",
        "[" * 3000: "cannot read",
    },
}


@pytest.mark.parametrize(("name", "content"), [(name, content) for name in DAMAGE for content in DAMAGE[name]])
def test_damaged_files_of_a_run_are_one_line_that_names_them(name, content, tmp_path, monkeypatch, capsys):
    run = a_run(tmp_path)
    (run / name).write_text(content)
    line = refused(monkeypatch, capsys, tmp_path, run)
    assert DAMAGE[name][content] in line
    assert str(run / name) in line
    assert not (tmp_path / "compare.csv").exists()


def test_any_value_of_an_option_is_compared(tmp_path, monkeypatch, capsys):
    """A number beyond floats, a date, a nested list: all that YAML knows."""
    for i, value in enumerate((10**400, "2026-11-21", [[1]], None)):
        run = a_run(tmp_path, i, alpha_min=value, seed=i)
        (run / "config.yaml").write_text((run / "config.yaml").read_text() + f"more: 2026-11-2{i}\n")
    compare(monkeypatch, tmp_path, *sorted((tmp_path / "digits").iterdir()))
    assert "more differs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--by", "alpha"], "have no such option"),
        (["--by", "schedule"], "may be model.net.schedule, model.optim.schedule: name one"),
        (["--x", "epoch"], "does not say its epochs"),
        (["--out", "x.csv"], "the figure is a .png"),
        (["digits/version_0/../version_0"], "is named twice"),
    ],
)
def test_wrong_options_are_refused(args, words, tmp_path, monkeypatch, capsys):
    run = a_run(tmp_path, epoch_steps=1000)
    assert words in refused(monkeypatch, capsys, tmp_path, run, *args)


@pytest.mark.slow
def test_what_train_leaves_is_read(tmp_path):
    """Real files of real runs: two seeds of the default, made tiny, with looks every 20 steps."""
    content = yaml.safe_load((ROOT / "configs" / "digits.yaml").read_text())
    for callback in content["trainer"]["callbacks"]:
        if callback["class_path"].endswith("LinearProbes"):
            callback["init_args"] = {"every_n_steps": 20, "times": [0.1], "max_train": 200, "max_test": 100}
        if callback["class_path"].endswith("GenerationMetrics"):
            callback["init_args"]["num"] = 100
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(content))
    small = ["--model.net.dim=16", "--model.net.depth=2", "--model.sampling.steps=3", "--trainer.max_steps=60"]
    for seed in (0, 1):
        args = ["train.py", "fit", "--config=small.yaml", *small, f"--seed_everything={seed}"]
        trained = run_script(*args, "--trainer.log_every_n_steps=1", cwd=tmp_path)
        assert trained.returncode == 0, trained.stderr
    folders = [tmp_path / "runs" / "digits" / f"version_{seed}" for seed in (0, 1)]
    runs = [Run.read(folder) for folder in folders]
    assert [[look["step"] for look in run.looks] for run in runs] == [[20, 40, 60]] * 2
    assert runs[0].looks[-1]["epoch"] == pytest.approx(60 / 44)  # 1437 digits, 44 whole batches of 32
    assert all(run.last[key] > 0 for run in runs for key in (*KEYS, "fid", "is"))
    assert list(remarks(runs, "model.net.alpha_min")) == []
