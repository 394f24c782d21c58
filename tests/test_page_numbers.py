"""Numbers that the pages state follow from the tables of the pages, or from the code."""

import re
from statistics import fmean

import pytest
from conftest import ROOT
from scipy.stats import spearmanr

from benchmarks.studies import arm_tables, target
from benchmarks.studies.page_tables import merge_by_arm, parse_cell, read_tables
from uvit_decay import effective_decay, shortcuts
from uvit_decay.diffusion.sampling import Sampling

DOCS = ROOT / "docs"


def test_samplers_with_fixed_steps_have_the_network_evaluations_of_the_page():
    found = {}
    for row in read_tables(DOCS / "sampling.md", "## Options"):
        if row.get("network evaluations", "").isdigit():
            for name in re.findall(r"`([\w+-]+)`", row["sampler"]):
                found[name] = int(row["network evaluations"])
    assert len(found) == 7
    assert {name: Sampling(name, None).nfe for name in found} == found


def test_the_best_runs_have_the_effective_decay_of_the_page():
    rows = [row for row in read_tables(DOCS / "how_it_works.md", "## Why the decay should help") if "chosen by" in row]
    assert len(rows) == 7
    for row in rows:
        alphas = shortcuts(int(row["blocks"]), float(row["best alpha_min"])).alphas
        assert effective_decay(alphas) == pytest.approx(float(row["effective decay"]), rel=0.04), row


def test_the_rank_correlations_are_those_of_the_table():
    arms = merge_by_arm(read_tables(DOCS / "results_tables.md", "### One number?"))
    shown = [arm for name, arm in arms.items() if name not in ("gain", "official", "official_gain")]
    depths = [float(arm["-log10 P"]) for arm in shown]
    text = (DOCS / "results.md").read_text().partition("### One number?")[2]
    for column, stated in {
        "kNN": "-0.90",
        "linear probe": "-0.73",
        "effective rank": "-0.55",
        "share of the mean": "0.81",
        "loss, test": "0.79",
        "entropy of the spectrum": "-0.24",
    }.items():
        found = spearmanr(depths, [parse_cell(arm[column])[0] for arm in shown]).statistic
        assert f"{found:.2f}" == stated, column
        assert stated in text


def test_the_probes_of_the_sit_in_the_readme_are_those_of_the_arms():
    accuracies = arm_tables.read_statistics(arm_tables.TABLES, arm_tables.ACCURACY, 2000)
    plain, decayed = accuracies["v_skips"], accuracies["v_skips_decay"]
    assert plain.keys() == decayed.keys()
    (row,) = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| SiT (width 96")]
    assert f"{fmean(plain.values()) / 100:.3f} -> {fmean(decayed.values()) / 100:.3f} (0.8)" in row


def test_the_tables_of_targets_and_skips_are_those_of_the_arms(capsys):
    target.main([])
    printed = capsys.readouterr().out.splitlines()
    pages = (DOCS / "results.md").read_text() + (DOCS / "results_tables.md").read_text()
    shown = [line for line in pages.splitlines() if re.match(r"\| .* \(\d seeds?\) \||\| `[vx]_.* \| 0\.\d{4}", line)]
    assert len(shown) > 20
    assert [line for line in shown if line not in printed] == []
