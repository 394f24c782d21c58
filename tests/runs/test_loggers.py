"""The run folder: one for each run, and none for a run that never began."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from conftest import ROOT, tiny_task, tiny_trainer, train
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger
from refusals import find_line, raises_user_error, refused

from uvit_decay.callbacks import RunLogger
from uvit_decay.commands.train import launch
from uvit_decay.data import Digits
from uvit_decay.runs import history
from uvit_decay.runs.loggers import tolerate_failure
from uvit_decay.runtime.signals import stoppable
from uvit_decay.terminal.errors import UserError, user_errors

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


def test_a_number_follows_the_highest_and_one_that_is_there_is_refused(tmp_path):
    (tmp_path / "x" / "version_6").mkdir(parents=True)
    logger = RunLogger("x", str(tmp_path))
    assert logger.version == 7
    logger.log_metrics({"a": 1.0}, 0)
    logger.finalize("success")
    with raises_user_error("exists"):
        RunLogger("x", str(tmp_path), version=7).save()


class Foreign(Logger):
    """A logger as W&B's: it takes pictures, and its folder is the current one."""

    name, version, save_dir = "foreign", "1", "."
    log_metrics = log_hyperparams = None

    def __init__(self) -> None:
        Logger.__init__(self)
        self.log_metrics, self.log_hyperparams, self.log_image = Mock(), Mock(), Mock()


class WithClient(Foreign, MLFlowLogger):
    """MLflow's logger without MLflow."""

    experiment, run_id = Mock(), "7"
    after_save_checkpoint, finalize = Logger.after_save_checkpoint, Logger.finalize


def fit(monkeypatch, folder, *loggers, more=()):
    """Run two steps of a tiny network with previews, probes and branches; the loggers are added to those of flags."""
    net = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.max_steps=2", "--trainer.limit_val_batches=0"]
    few = {"class_path": "Preview", "init_args": {"rows": 1, "columns": 2}}
    probes = {"class_path": "LinearProbes", "init_args": {"times": [0.1], "max_train": 100, "max_test": 50}}
    branches = {"class_path": "BranchNorms", "init_args": {"every_n_steps": 1}}
    callbacks = [few, probes, branches, {"class_path": "LastCheckpoint"}, {"class_path": "Summary"}]
    flags = [*net, "--trainer.logger=false", f"--trainer.callbacks={json.dumps(callbacks)}"]
    flags += ["--model.sampling.steps=1", *more]

    class Added(launch.Launch):
        def instantiate_trainer(self, **options):
            return super().instantiate_trainer(**options, **({"logger": list(loggers)} if loggers else {}))

    monkeypatch.chdir(folder)
    Added.run(["fit", "--config", str(DIGITS), *flags])


def test_runs_without_a_logger_that_makes_folders_have_folders_of_their_own(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("mine")
    logger, other, mlflow = Foreign(), Foreign(), WithClient()
    other.log_image, other.experiment = None, Mock(spec=["add_image"])  # as TensorBoard's
    for loggers in ((), (logger, other, mlflow)):
        fit(monkeypatch, tmp_path, *loggers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "runs"]
    assert (tmp_path / "config.yaml").read_text() == "mine"
    for number in range(2):
        names = {path.name for path in (tmp_path / "runs" / "digits_uvit" / f"version_{number}").iterdir()}
        pictures = {"samples", "samples.png", "probes.png", "branches.png"}
        logs = {"probes.csv", "probes.jsonl", "branches.jsonl"}
        assert names - logs == pictures | {"checkpoints", "config.yaml", "launches.jsonl"}
    shown = ("branches", "samples", "probes")
    found = [call.kwargs for call in logger.log_image.call_args_list]
    assert [(one["key"], len(one["images"]), one["step"]) for one in found] == [(name, 1, 2) for name in shown]
    found = [call.args for call in other.experiment.add_image.call_args_list]
    assert [(name, picture.shape[-1], step) for name, picture, step in found] == [(name, 3, 2) for name in shown]
    found = [(*call.args, call.kwargs) for call in mlflow.experiment.log_image.call_args_list]
    assert [(run, kwargs) for run, _, kwargs in found] == [("7", {"key": name, "step": 2}) for name in shown]
    assert {picture.mode for _, picture, _ in found} == {"RGB"}
    assert logger.log_hyperparams.call_args.args[0]["model.net.dim"] == 16


def test_the_first_logger_that_makes_a_folder_gives_that_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # RunLogger makes its folder when it is built
    logger = Foreign()
    fit(monkeypatch, tmp_path, logger, RunLogger("x", "mine"))
    assert (tmp_path / "mine" / "x" / "version_0" / "checkpoints" / "last.ckpt").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}
    with raises_user_error("version_0"):
        fit(monkeypatch, tmp_path, CSVLogger("mine", "x", 0))


@pytest.mark.parametrize(
    ("hook", "left"), [("setup", False), ("on_fit_start", False), ("on_train_start", False), ("on_train_end", True)]
)
def test_a_run_that_never_began_leaves_no_folder(tmp_path, hook, left):
    logger, fail = RunLogger("x", str(tmp_path)), Mock(side_effect=UserError("on purpose"))
    with raises_user_error("on purpose"):
        tiny_trainer(tmp_path, LambdaCallback(**{hook: fail}), logger=logger, max_steps=6).fit(tiny_task(), Digits(32))
    assert (tmp_path / "x").exists() == left


def test_a_folder_that_holds_something_else_is_kept(tmp_path):
    logger = RunLogger("x", str(tmp_path))
    logger.experiment.flush()
    (tmp_path / "x" / "version_0" / "branches.jsonl").write_text("mine")
    (tmp_path / "x" / "version_0" / "notes.txt").write_text("mine")
    logger.finalize("failed")
    assert len(list((tmp_path / "x" / "version_0").iterdir())) == 3


def test_a_root_that_cannot_be_written_is_found_before_training(tmp_path):
    (tmp_path / "root").write_text("a file, in which no folder can be made, not even by root")
    flags = ["--config", str(DIGITS), "--trainer.logger=false", f"--trainer.default_root_dir={tmp_path / 'root' / 'x'}"]
    with raises_user_error("/root/x"):
        launch.Launch.run(["fit", *flags])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_before_its_first_step_leaves_no_folder(tmp_path, number):
    stopped = LambdaCallback(setup=lambda *_, **__: os.kill(os.getpid(), number))
    trainer = tiny_trainer(tmp_path, stopped, logger=RunLogger("x", str(tmp_path)))
    with pytest.raises(SystemExit) as stop, user_errors(), stoppable():
        trainer.fit(tiny_task(), Digits(32))
    assert stop.value.code == 128 + number
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data=uvit_decay.data.CIFAR10", "--data.path=nowhere"], ("CIFAR10", "nowhere")),
        (
            ["--ckpt_path={trained}", "--trainer.max_epochs=1", "--trainer.limit_train_batches=6"],
            "--trainer.max_epochs",
        ),
        (["--ckpt_path={trained}", "--trainer.max_steps=12"], ("step 12", "--trainer.max_steps")),
        ([f"--ckpt_path={ROOT}/checkpoints/digits.safetensors"], ("optimizer", ".ckpt")),
    ],
)
def test_a_start_that_fails_leaves_no_folder(trained, tmp_path, monkeypatch, capsys, flags, message):
    tiny = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.limit_val_batches=0", "--trainer.callbacks=[]"]
    words = [flag.format(trained=trained) for flag in flags]
    find_line(refused(capsys, train, monkeypatch, tmp_path, "fit", *tiny, *words), message)
    assert not (tmp_path / "runs").exists()


def test_a_logger_that_fails_warns_once_and_ends_neither_the_run_nor_the_others(tmp_path, monkeypatch, caplog):
    failing, other = Foreign(), Foreign()
    for method in ("log_image", "log_metrics", "save", "finalize"):
        setattr(failing, method, Mock(side_effect=ConnectionError("no network")))
    pictures, numbers = failing.log_image, other.log_metrics
    fit(monkeypatch, tmp_path, failing, other, more=["--trainer.log_every_n_steps=1"])
    assert [call.kwargs["key"] for call in other.log_image.call_args_list] == ["branches", "samples", "probes"]
    assert pictures.call_count == 3
    calls = [call.kwargs for call in numbers.call_args_list if "train/loss" in call.kwargs.get("metrics", {})]
    assert [call["step"] for call in calls] == [0, 1]
    run = tmp_path / "runs" / "digits_uvit" / "version_0"
    assert (run / "checkpoints" / "last.ckpt").exists()
    assert len(history.read(run / "probes.jsonl")) == 1
    (warning,) = [record.getMessage() for record in caplog.records if "no network" in record.getMessage()]
    assert "Foreign" in warning


def test_a_run_folder_that_cannot_be_written_ends_the_run(tmp_path):
    with pytest.raises(OSError, match="disk"), tolerate_failure(CSVLogger(str(tmp_path))):
        raise OSError(28, "disk")
