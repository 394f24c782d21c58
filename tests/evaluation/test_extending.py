"""The worked examples of docs/extending.md and CONTRIBUTING.md: their code, as it is, adds metrics and extractors."""

import json
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from evaluations import evaluate, refused

from uvit_decay.evaluation.feature_table import EXTRACTORS
from uvit_decay.evaluation.metric_table import METRICS
from uvit_decay.image_io import save_npz


@pytest.fixture
def extended():
    """The tables with the entries of both pages."""
    before = dict(METRICS), dict(EXTRACTORS)
    for page in ("docs/extending.md", "CONTRIBUTING.md"):
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        assert len(blocks) == 2
        for block in blocks:
            exec(compile(block, page, "exec"), {"__name__": "example"})
    yield
    for table, entries in zip((METRICS, EXTRACTORS), before, strict=True):
        table.clear()
        table.update(entries)


@pytest.fixture
def sides(tmp_path):
    """Two files of ten images each: black ones, and ones of which every pixel is (3, 4, 0)."""
    black = torch.zeros(10, 3, 8, 8, dtype=torch.uint8)
    save_npz(tmp_path / "black.npz", [black], 10)
    save_npz(tmp_path / "dark.npz", [black + torch.tensor([3, 4, 0], dtype=torch.uint8)[:, None, None]], 10)
    return ["--samples", "dark.npz", "--reference", "black.npz", "--out", "report.json"]


def test_values_are_in_the_reports(extended, sides, tmp_path, monkeypatch, capsys):
    evaluate(monkeypatch, tmp_path, "generation", *sides, "--features", "colours", "--metrics", "fid,mean",
             "--allow-few")  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["values"]["mean_distance"] == pytest.approx(16**0.5 * 5)  # 16 parts, each |(3, 4, 0)| away
    assert report["values"]["fid"] == pytest.approx(16 * 25)
    assert set(report["metrics"]) == {f"{name}/dark-10_vs_black-10_colours" for name in ("fid", "mean_distance")}
    assert report["protocol"]["extractor"] == "colours-000000000000"
    assert any("features of colours, not Inception's" in remark for remark in report["remarks"])
    page = " ".join((tmp_path / "report.html").read_text().split())
    assert "Distance of means" in page
    assert "20.000" in page
    assert "how far apart the average features are; <strong>lower is better</strong>" in page
    assert "mean_distance 20" in capsys.readouterr().out


def test_the_example_for_contributors_is_computed(extended, sides, tmp_path, monkeypatch):
    black, bright = (torch.full((10, 1, 8, 8), value, dtype=torch.uint8) for value in (0, 7))
    save_npz(tmp_path / "black.npz", [black], 10)
    save_npz(tmp_path / "dark.npz", [bright], 10)
    evaluate(monkeypatch, tmp_path, "generation", *sides, "--features", "pixels", "--metrics", "worst")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["metrics"] == {"worst/dark-10_vs_black-10_pixels": 7}
    assert "Worst mean" in (tmp_path / "report.html").read_text()


def test_what_they_lack_is_one_line(extended, sides, tmp_path, monkeypatch, capsys):
    base = ["generation", *sides, "--features", "colours", "--metrics"]
    assert "some of fid,is,kid,prc,sfid,mind,fdd,kdd,mean,worst" in refused(
        monkeypatch, tmp_path, capsys, *base, "best"
    )
    assert "--metrics is needs logits, which colours does not yield" in refused(
        monkeypatch, tmp_path, capsys, *base, "is"
    )
    assert "fid needs 49 or more" in refused(monkeypatch, tmp_path, capsys, *base, "fid")
    line = refused(monkeypatch, tmp_path, capsys, "generation", *sides, "--features", "colour")
    assert "takes one of inception, digits, dinov2, colours, pixels, got colour;" in line


def test_the_table_is_in_the_help_without_torch():
    code = "import sys, runpy; sys.argv = ['evaluate.py', 'generation', '--help']\n"
    code += f"try: runpy.run_path({str(ROOT / 'evaluate.py')!r}, run_name='__main__')\n"
    code += "except SystemExit: print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert shown.stdout.endswith("False\n"), shown.stderr
    assert ",".join(METRICS) in shown.stdout
