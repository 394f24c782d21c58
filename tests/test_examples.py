"""The programs of examples/ run from any folder."""

import runpy
import sys

import pytest
from conftest import ROOT

PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
SELF_CONTAINED = [program for program in PROGRAMS if program.stem != "import_latents"]  # tests/test_import_latents.py
SHORT = {"torch_loop", "lightning_script", "own_loss"}  # these take a number of steps


@pytest.mark.parametrize("program", SELF_CONTAINED, ids=lambda program: program.stem)
def test_an_example_runs(program, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program.name, *(["--steps", "4"] if program.stem in SHORT else [])])
    runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().out
