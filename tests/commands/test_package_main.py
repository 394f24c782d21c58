"""`uvit-decay COMMAND`, in this process."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from refusals import find_line

import uvit_decay
from uvit_decay.__main__ import COMMANDS, main


def uvit(monkeypatch, *args, program="/somewhere/bin/uvit-decay"):
    """Run `uvit-decay ...`; return the exit code."""
    monkeypatch.setattr(sys, "argv", [program, *map(str, args)])
    try:
        main()
    except SystemExit as stop:
        return stop.code or 0
    return 0


def test_help_and_version(monkeypatch, capsys):
    assert uvit(monkeypatch) == 0
    listed = capsys.readouterr().out
    assert all(f"uvit-decay {name} " in listed for name in COMMANDS)
    assert uvit(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"uvit_decay {version('uvit_decay')}\n"
    assert uvit_decay.__version__ == version("uvit_decay")
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = uvit_decay.nothing


def test_an_unknown_command_is_one_line(monkeypatch, capsys):
    assert uvit(monkeypatch, "smaple") == 2
    find_line(capsys.readouterr().err, "error: smaple", "train, doctor,")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_speaks_of_commands_not_of_scripts(monkeypatch, capsys, name):
    words = ["train", "--help"] if name == "doctor" else [name, "--help"]
    assert uvit(monkeypatch, *words, program=str(Path(uvit_decay.__file__).parent / "__main__.py")) == 0
    shown = capsys.readouterr().out
    assert "uvit-decay" in shown
    assert not any(f"{script}.py" in shown for script in ("train", "sample", "evaluate"))


def test_a_bundled_configuration_by_its_name(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert uvit(monkeypatch, "train", "fit", "--config=resnet18", "--trainer.max-steps", 7, "--print_config") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    wanted = yaml.safe_load((ROOT / "configs" / "resnet18.yaml").read_text())
    assert shown["model"]["class_path"] == wanted["model"]["class_path"]
    assert shown["trainer"]["max_steps"] == 7


def test_what_a_run_of_the_command_says_names_commands(monkeypatch, tmp_path, caplog, capsys):
    monkeypatch.chdir(tmp_path)
    tiny = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.max_steps=2", "--trainer.limit_val_batches=0"]
    options = ["--trainer.callbacks=uvit_decay.callbacks.LastCheckpoint", "--trainer.callbacks+=Summary"]
    options.append("--trainer.logger.experiment=my digits")
    assert uvit(monkeypatch, "train", "fit", *tiny, *options) == 0, capsys.readouterr().err
    last = "runs/my digits/version_0/checkpoints/last.ckpt"
    find_line(caplog.text, f"uvit-decay sample --ckpt '{last}'")
    assert uvit(monkeypatch, "export", "checkpoints/digits.safetensors", "model.safetensors") == 0  # the bundled one
    assert "wrote model.safetensors" in capsys.readouterr().out


def test_help_imports_no_torch():
    """Except `train.py fit`, whose help shows arguments of classes, and `generation`, with its table of metrics."""
    code = """
import runpy, sys
HELPS = ["train", "sample", "evaluate", "export", "import", "encode"]
HELPS += [f"evaluate {name}" for name in "generation statistics probe classify reconstruct compare".split()]
for words in HELPS:
    sys.argv = ["uvit_decay", *words.split(), "--help"]
    try:
        runpy.run_module("uvit_decay", run_name="__main__")
    except SystemExit as end:
        assert not end.code, words
    assert "torch" not in sys.modules, words
for script, *words in (["sample.py"], ["evaluate.py", "generation"]):
    sys.argv = [script, *words, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        assert "torch" not in sys.modules, script
"""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert "kid,kdd,prc,sfid,mind" in ended.stdout
