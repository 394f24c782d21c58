"""The precision of a run that asks for none: by device and width, said, saved and kept when the run is resumed."""

import pytest
import torch
import yaml
from conftest import train

from uvit_decay.runtime import precision

WIDE = ["--model.net.dim=96", "--model.net.depth=2", "--trainer.limit_val_batches=0", "--data.batch_size=4"]
WIDE += ['--trainer.callbacks=[{"class_path": "uvit_decay.callbacks.LastCheckpoint"}]']


def run(monkeypatch, caplog, folder, fast, *flags):
    """Return the precision in the saved configuration, the printed lines about it, and the checkpoint."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(precision, "_list_cpu_features", lambda: ["amx_bf16"] if fast else ["avx2"])
    folder.mkdir()
    caplog.clear()
    train(monkeypatch, folder, "fit", *WIDE, *flags)
    (version,) = (folder / "runs" / "digits").glob("version_*")
    (checkpoint,) = folder.rglob("*.ckpt")
    chosen = yaml.safe_load((version / "config.yaml").read_text())["trainer"]["precision"]
    return chosen, [text for text in caplog.messages if "bf16" in text], checkpoint


@pytest.mark.parametrize(
    ("flags", "fast", "precision"),
    [([], True, "bf16-mixed"), ([], False, None), (["--trainer.precision=32-true"], True, "32-true")],
)
def test_a_run_has_the_precision_of_the_cpu_on_which_it_began(flags, fast, precision, monkeypatch, caplog, tmp_path):
    began, lines, checkpoint = run(monkeypatch, caplog, tmp_path / "a", fast, "--trainer.max_steps=1", *flags)
    assert torch.load(checkpoint, weights_only=False)["settings"].get("trainer.precision") == precision
    assert len(lines) == (precision == "bf16-mixed")
    more = ["--trainer.max_steps=2", f"--ckpt_path={checkpoint}"]
    resumed, _, _ = run(monkeypatch, caplog, tmp_path / "b", not fast, *more)
    assert began == resumed == precision


def test_a_run_without_a_logger_goes_on_in_float32_too(monkeypatch, caplog, tmp_path):
    flags = ["--trainer.logger=false", "--ckpt_path=auto"]
    for fast, steps in ((False, 1), (True, 2)):
        monkeypatch.setattr(precision, "_list_cpu_features", lambda fast=fast: ["amx_bf16"] if fast else [])
        train(monkeypatch, tmp_path, "fit", *WIDE, *flags, f"--trainer.max_steps={steps}")
    (config,) = (tmp_path / "runs").rglob("config.yaml")
    assert yaml.safe_load(config.read_text())["trainer"]["precision"] is None
    assert not [text for text in caplog.messages if "bf16" in text]


def test_narrow_networks_stay_in_float32(monkeypatch, caplog, tmp_path):
    chosen, lines, _ = run(monkeypatch, caplog, tmp_path / "a", True, "--trainer.max_steps=1", "--model.net.dim=64")
    assert (chosen, lines) == (None, [])
