"""The precision of a run that asks for none: by device and width, said, saved and kept when the run is resumed."""

import pytest
import torch
import yaml
from conftest import train
from refusals import find_line

from uvit_decay.commands.train import launch
from uvit_decay.runtime import precision

WIDE = ["--model.net.dim=96", "--model.net.depth=2", "--trainer.limit_val_batches=0", "--data.batch_size=4"]
WIDE += ['--trainer.callbacks=[{"class_path": "uvit_decay.callbacks.LastCheckpoint"}]']


def run(monkeypatch, caplog, folder, fast, *flags):
    """Return the precision in the saved configuration, the printed lines about it, and the checkpoint."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(precision, "product_ratio", lambda: 2.2 if fast else 0.5)
    monkeypatch.setattr(launch, "product_ratio", precision.product_ratio)
    folder.mkdir()
    caplog.clear()
    train(monkeypatch, folder, "fit", *WIDE, *flags)
    (version,) = (folder / "runs" / "digits").glob("version_*")
    (checkpoint,) = folder.rglob("*.ckpt")
    chosen = yaml.safe_load((version / "config.yaml").read_text())["trainer"]["precision"]
    return chosen, [text for text in caplog.messages if "bf16" in text], checkpoint


def test_a_cpu_that_is_fast_in_bfloat16_uses_it_and_another_one_says_that_it_does_not(monkeypatch, caplog, tmp_path):
    fast, lines, checkpoint = run(monkeypatch, caplog, tmp_path / "a", True, "--trainer.max_steps=1")
    assert fast == "bf16-mixed"
    find_line(lines[0], "bf16-mixed", "CPU", 2.2)
    assert torch.load(checkpoint, weights_only=False)["settings"]["trainer.precision"] == "bf16-mixed"
    more = ["--trainer.max_steps=2", f"--ckpt_path={checkpoint}"]
    slow, lines, _ = run(monkeypatch, caplog, tmp_path / "b", False, *more)
    assert slow is None
    (line,) = lines
    assert "trainer.precision nothing (was bf16-mixed)" in line


@pytest.mark.parametrize(("flags", "precision"), [([], None), (["--trainer.precision=32-true"], "32-true")])
def test_a_run_that_began_in_float32_goes_on_in_it(flags, precision, monkeypatch, caplog, tmp_path):
    *began, checkpoint = run(monkeypatch, caplog, tmp_path / "a", False, "--trainer.max_steps=1", *flags)
    more = ["--trainer.max_steps=2", f"--ckpt_path={checkpoint}"]
    *resumed, _ = run(monkeypatch, caplog, tmp_path / "b", True, *more)
    assert (began, resumed) == ([precision, []], [None, []])


def test_a_run_without_a_logger_goes_on_in_float32_too(monkeypatch, caplog, tmp_path):
    flags = ["--trainer.logger=false", "--ckpt_path=auto"]
    for fast, steps in ((False, 1), (True, 2)):
        monkeypatch.setattr(precision, "product_ratio", lambda fast=fast: 2.2 if fast else 0.5)
        monkeypatch.setattr(launch, "product_ratio", precision.product_ratio)
        train(monkeypatch, tmp_path, "fit", *WIDE, *flags, f"--trainer.max_steps={steps}")
    (config,) = (tmp_path / "runs").rglob("config.yaml")
    assert yaml.safe_load(config.read_text())["trainer"]["precision"] is None
    assert not [text for text in caplog.messages if "bf16" in text]


@pytest.mark.parametrize("flag", ["--trainer.precision=32-true", "--model.net.dim=64"])
def test_what_is_asked_for_wins_and_narrow_networks_stay_in_float32(flag, monkeypatch, caplog, tmp_path):
    chosen, lines, _ = run(monkeypatch, caplog, tmp_path / "a", True, "--trainer.max_steps=1", flag)
    assert chosen in ("32-true", None)
    assert lines == []
