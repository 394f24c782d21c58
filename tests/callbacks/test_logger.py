"""The run folder: one for each run, and none for a run that never began."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT, run_script, tiny_task, tiny_trainer
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from uvit_decay import cli
from uvit_decay.callbacks import RunLogger
from uvit_decay.data import Digits
from uvit_decay.runtime.errors import UserError

STARTS = 8
DIGITS = ROOT / "configs" / "digits.yaml"


def test_runs_that_start_at_the_same_moment_have_folders_of_their_own(tmp_path, monkeypatch):
    gate, listed = threading.Barrier(STARTS), TensorBoardLogger._get_next_version

    def together(logger) -> int:
        number = listed(logger)
        gate.wait(10)  # all have looked for the next number before any of them makes its folder
        return number

    monkeypatch.setattr(TensorBoardLogger, "_get_next_version", together)
    with ThreadPoolExecutor(STARTS) as pool:
        actual = list(pool.map(lambda _: RunLogger("race", str(tmp_path)).version, range(STARTS)))
    assert sorted(actual) == list(range(STARTS))
    assert len(list((tmp_path / "race").iterdir())) == STARTS


def test_a_number_follows_the_highest(tmp_path):
    (tmp_path / "x" / "version_6").mkdir(parents=True)
    assert RunLogger("x", str(tmp_path)).version == 7


class Fails(Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.fail)

    def fail(self, *_, **__) -> None:
        raise UserError("on purpose")


@pytest.mark.parametrize(
    ("hook", "left"), [("setup", False), ("on_fit_start", False), ("on_train_start", False), ("on_train_end", True)]
)
def test_a_run_that_never_began_leaves_no_folder(tmp_path, hook, left):
    logger = RunLogger("x", str(tmp_path))
    with pytest.raises(UserError, match="on purpose"):
        tiny_trainer(tmp_path, Fails(hook), logger=logger, max_steps=6).fit(tiny_task(), Digits(32))
    assert (tmp_path / "x" / "version_0").exists() == left


def test_a_folder_that_holds_something_else_is_kept(tmp_path):
    logger = RunLogger("x", str(tmp_path))
    logger.experiment.flush()
    (tmp_path / "x" / "version_0" / "notes.txt").write_text("mine")
    logger.finalize("failed")
    assert len(list((tmp_path / "x" / "version_0").iterdir())) == 2


@pytest.mark.slow
def test_data_that_are_not_there_leave_no_folder(tmp_path):
    result = run_script("train.py", "fit", "--data=uvit_decay.data.CIFAR10", "--data.path=nowhere", cwd=tmp_path)
    assert result.returncode == 2
    assert "no CIFAR10 at nowhere" in result.stderr.splitlines()[-1]
    assert not list((tmp_path / "runs" / "digits").iterdir())


@pytest.mark.parametrize("logger", ["false", "lightning.pytorch.loggers.CSVLogger"])
def test_a_root_that_cannot_be_written_is_found_before_training(tmp_path, monkeypatch, logger):
    (tmp_path / "root").write_text("a file, in which no folder can be made, not even by root")
    place = "default_root_dir" if logger == "false" else "logger.save_dir"
    flags = ["--config", str(DIGITS), f"--trainer.logger={logger}", f"--trainer.{place}={tmp_path / 'root' / 'x'}"]
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", *flags])
    with pytest.raises(UserError, match="cannot write .*/root/x"):
        cli.CLI.run()
