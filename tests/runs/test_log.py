"""A resumed run: its folder begins with the history and the log of the run that it continues."""

import json
import shutil
from unittest.mock import Mock

import pytest
from conftest import tiny_task, tiny_trainer
from lightning.pytorch.callbacks import LambdaCallback
from refusals import raises_user_error
from runs import StopAt
from small_training import rows

from uvit_decay.callbacks import GenerationMetrics, LinearProbes, RunLogger
from uvit_decay.data import Digits
from uvit_decay.encoders import SmallClassifier
from uvit_decay.runs import history

HISTORIES = (history.PROBES, history.GENERATION)
EVERY = {"every_n_steps": 10, "at_end": False}


def a_run(folder, version, *more, stop=20, ckpt_path=None):
    """Return the folder of a run of 20 steps, or of fewer, that is evaluated after every ten."""
    callbacks = [LinearProbes(times=(0.1,), max_train=50, max_test=50, **EVERY), StopAt(stop), *more]
    logger = RunLogger("x", str(folder), version)
    options = {"logger": logger, "max_steps": 20, "log_every_n_steps": 4}
    tiny_trainer(folder, *callbacks, **options).fit(tiny_task(), Digits(32), ckpt_path=ckpt_path)
    return folder / "x" / f"version_{version}"


def test_a_resumed_run_has_the_history_and_the_log_of_the_run_that_was_not_stopped(tmp_path):
    def metrics():
        return GenerationMetrics(SmallClassifier(), num=20, allow_few=True, **EVERY)

    whole = a_run(tmp_path, 0, metrics())
    half = a_run(tmp_path, 1, metrics(), stop=12)
    checkpoint = half / "checkpoints" / "last.ckpt"
    later = history.Measurement(15, 0.3, 480, {"fid": 0.0}, {})  # of a first continuation, in the same folder
    history.append(half / history.GENERATION, later)
    rest = a_run(tmp_path, 2, metrics(), ckpt_path=checkpoint)
    for name in HISTORIES:
        steps = [measurement.step for measurement in history.read(half / name)]
        assert steps[0] == 10
        assert (rest / name).read_text() == (whole / name).read_text()
    first = history.read(whole / history.PROBES)[0]
    assert (first.step, first.epoch, first.images_seen) == (10, pytest.approx(10 / 44), 10 * 32)
    assert first.metadata["best"]["test_accuracy"] == first.values["best_accuracy"]
    assert rows(rest) == rows(whole)


def test_a_checkpoint_of_no_run_is_continued_without_a_history(half, tmp_path):
    copied = shutil.copy(half / "checkpoints" / "last.ckpt", tmp_path)
    rest = a_run(tmp_path, 1, ckpt_path=copied)
    assert [measurement.step for measurement in history.read(rest / history.PROBES)] == [20]


DAMAGED = {
    "probes.jsonl": (json.dumps({"step": 5}), ("line 1", "epoch")),
    "metrics.csv": ("step,train/loss\nx,1.0\n", "'x'"),
}


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("half"), 0, stop=12)


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_logs_are_one_line_before_training(half, tmp_path, name):
    content, message = DAMAGED[name]
    shutil.copytree(half, tmp_path / "x" / "version_0")
    (tmp_path / "x" / "version_0" / name).write_text(content)
    with raises_user_error(name, message):
        a_run(tmp_path, 1, ckpt_path=tmp_path / "x" / "version_0" / "checkpoints" / "last.ckpt")
    assert not (tmp_path / "x" / "version_1").exists()  # `compare` would take copied histories for a run


def test_a_resumed_run_that_fails_before_any_result_leaves_no_folder(half, tmp_path):
    fail = LambdaCallback(on_train_batch_start=Mock(side_effect=ValueError("no memory")))
    with pytest.raises(ValueError, match="no memory"):
        a_run(tmp_path, 1, fail, ckpt_path=half / "checkpoints" / "last.ckpt")
    assert not (tmp_path / "x" / "version_1").exists()


def test_half_a_line_of_the_log_is_left_out(tmp_path):
    log = tmp_path / "metrics.csv"
    log.write_text("step,train/loss\n1,0.5\n2,0.2")
    history.cut_rows(12, log, log)
    assert rows(tmp_path) == [{"step": "1", "train/loss": "0.5"}]
