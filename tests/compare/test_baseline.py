"""Arms of several seeds beside a baseline: paired differences against numbers by hand, and what is refused."""

import csv
import shutil

import pytest
import yaml
from refusals import find_line
from run_folders import a_run, compare, refused, shift_evaluations

from uvit_decay.compare.baseline import group_by_arms, name_arm, options_of_arms
from uvit_decay.compare.runs import FinishedRun

GAINS = {0: 0.01, 1: 0.02, 2: 0.06}  # of the arm decay over the arm plain, by seed: mean 0.03, standard error 0.01528
SPREAD = 0.1  # between seeds, which the pairs have in common


def name_experiment(run, name):
    """Give the experiment of a run folder another name, and return its folder."""
    return run.parent.rename(run.parent.with_name(name))


@pytest.fixture
def arms(tmp_path):
    """Return the folders of the experiments: two arms of three seeds."""
    folders = []
    for arm, alpha in (("plain", 1.0), ("decay", 0.7)):
        for seed, gain in GAINS.items():
            accuracy = -0.3 + SPREAD * seed + gain * (arm == "decay")
            options = {"evaluations": shift_evaluations(accuracy), "fid": 10.0 + seed, "alpha_min": alpha, "seed": seed}
            folders.append(name_experiment(a_run(tmp_path, **options), f"{arm}_s{seed}"))
    return folders


@pytest.mark.parametrize("flags", [["--baseline", "plain"], ["--baseline", "1.0"], ["--baseline=plain", "--by=arm"]])
def test_differences_are_paired_by_seed(arms, tmp_path, monkeypatch, capsys, flags):
    compare(monkeypatch, tmp_path, *arms, *flags)
    shown = capsys.readouterr()
    line = find_line(shown.out, "| 3 | +0.030 +- 0.015 | +0.030 +- 0.015 |")
    assert line.startswith("| 0.7 |" if "1.0" in flags else "| decay |")
    assert shown.err == ""
    rows = list(csv.DictReader((tmp_path / "compare.csv").open()))
    plain, decay, _ = rows
    assert plain["best_accuracy_difference"] == ""
    assert float(decay["best_accuracy_difference"]) == pytest.approx(0.03)
    assert float(decay["best_accuracy_difference_error"]) == pytest.approx(0.0152753, rel=1e-5)
    assert float(decay["best_accuracy_std"]) > 0.1
    assert float(decay["fd_difference"]) == 0.0


def test_an_arm_is_an_experiment_without_its_own_seed_at_the_end(tmp_path):
    names = {"a_s3": "a", "a-seed3": "a", "a_3": "a", "a_s4": "a_s4", "rate_4e-3": "rate_4e", "rate_1e-4": "rate_1e-4"}
    for experiment, arm in names.items():
        folder = name_experiment(a_run(tmp_path, seed=3), experiment)
        assert name_arm(FinishedRun.read(folder)) == name_arm(FinishedRun.read(folder / "version_0")) == arm


def test_arms_are_defined_by_what_differs_between_them_alone(arms):
    assert options_of_arms(group_by_arms(list(map(FinishedRun.read, arms)))) == ["model.net.alpha_min"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--baseline", "other"], ("--baseline other", "decay", "0.7")),
        (["--baseline", "1.0", "--by", "arm"], ("--baseline 1.0", "plain", "decay")),
        (["--baseline", "plain", "--by", "alpha_min"], ("--baseline plain", "1.0", "0.7", "--by arm")),
        (["--baseline", "plain", "--x", "dim"], ("--x dim",)),
    ],
)
def test_what_cannot_be_paired_is_refused(arms, tmp_path, monkeypatch, capsys, flags, words):
    find_line(refused(monkeypatch, capsys, tmp_path, *arms, *flags), *words)


def test_a_baseline_needs_another_arm_with_a_common_seed(arms, tmp_path, monkeypatch, capsys):
    for chosen in (arms[:3], (arms[0], arms[4])):
        find_line(refused(monkeypatch, capsys, tmp_path, *chosen, "--baseline", "plain"), "--baseline", "plain")


def test_what_defines_the_arms_is_said_once_and_completely(arms, tmp_path, monkeypatch, capsys):
    for run in arms[:3]:
        path = run / "version_0" / "config.yaml"
        settings = yaml.safe_load(path.read_text())
        settings["data"]["init_args"]["batch_size"] = 77
        path.write_text(yaml.safe_dump(settings))
    compare(monkeypatch, tmp_path, *arms, "--baseline", "plain")
    out = capsys.readouterr().out
    find_line(out, "data.batch_size", "77 in plain")
    find_line(out, "model.net.alpha_min", "1.0 in plain", "0.7 in decay")


def test_a_value_that_some_pairs_lack_says_how_many_have_it(arms, tmp_path, monkeypatch, capsys):
    (arms[5] / "version_0" / "generation.jsonl").unlink()
    compare(monkeypatch, tmp_path, *arms, "--baseline", "plain")
    out = capsys.readouterr().out
    find_line(out, "| decay | 3 |", "10.50 +- 0.71 (2)")
    find_line(out, "| decay | 3 |", "+0.030 +- 0.015 |", "+0.00 +- 0.00 (2)")
    row = list(csv.DictReader((tmp_path / "compare.csv").open()))[1]
    assert (row["runs"], row["best_accuracy_pairs"], row["fd_pairs"]) == ("3", "3", "2")


def test_two_runs_of_a_seed_are_one_pair(arms, tmp_path, monkeypatch, capsys):
    again = a_run(tmp_path, evaluations=shift_evaluations(-0.3 + 0.03), fid=10.0, alpha_min=0.7, seed=0)
    shutil.copytree(again, arms[3].parent / "decay_seed0" / "version_0")
    compare(monkeypatch, tmp_path, *arms, arms[3].parent / "decay_seed0", "--baseline", "plain")
    find_line(capsys.readouterr().out, "| decay | 3 | +0.033 +- 0.013 |")  # 0.02 of seed 0 is a mean of two runs
