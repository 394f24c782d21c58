"""Signals while training: the step is finished, saved, and the run stops; a second wish stops it at once."""

import os
import signal
from unittest.mock import Mock

import pytest
import torch
from conftest import tiny_task, tiny_trainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from runs import fit
from small_training import rows

from uvit_decay.callbacks import LastCheckpoint, Preview, RunLogger, stopping
from uvit_decay.data import Digits
from uvit_decay.terminal.errors import user_errors


class Signals(Callback):
    """Sends this process signals in the middle of step 4."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def on_after_backward(self, trainer, task) -> None:
        if trainer.global_step == 3:
            for number in self.numbers:
                os.kill(os.getpid(), number)


def stopped(folder, *callbacks):
    """Return the exit code of a training that is stopped, and the step of its checkpoint, if there is one."""
    with pytest.raises(SystemExit) as stop, user_errors():
        tiny_trainer(folder, LastCheckpoint(), *callbacks, max_steps=8).fit(tiny_task(), Digits(32))
    path = folder / "checkpoints" / "last.ckpt"
    return stop.value.code, torch.load(path, weights_only=True)["global_step"] if path.exists() else None


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([signal.SIGINT], 130),
        ([signal.SIGTERM] * 2, 143),
        ([signal.SIGUSR1] * 2, 85),
        ([signal.SIGUSR1, signal.SIGTERM], 85),
    ],
)
def test_a_signal_finishes_the_step_and_saves_it_also_if_a_launcher_repeats_it(tmp_path, numbers, code):
    before = signal.getsignal(numbers[0])
    assert stopped(tmp_path, Signals(*numbers)) == (code, 4)
    assert signal.getsignal(numbers[0]) is before


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_stops_at_once(tmp_path, monkeypatch, signum, code):
    monkeypatch.setattr(stopping, "ONE_SIGNAL", 0.0)
    assert stopped(tmp_path, Signals(signum, signum)) == (code, None)


@pytest.mark.parametrize(
    ("signum", "code", "every"), [(signal.SIGINT, 130, 7), (signal.SIGUSR1, 85, 7), (signal.SIGTERM, 143, 0)]
)
def test_a_signal_in_an_evaluation_leaves_it_at_once_and_its_step_is_saved(tmp_path, signum, code, every):
    class Slow(Preview):
        def evaluate(self, trainer, task) -> None:
            os.kill(os.getpid(), signum)
            super().evaluate(trainer, task)

    before = signal.getsignal(signum)
    assert stopped(tmp_path, Slow(every_n_steps=every)) == (code, every or 8)
    assert not (tmp_path / "samples.png").exists()
    assert signal.getsignal(signum) is before


class SlowPreview(Preview):
    """Previews after the steps 4 and 8, the first of which a signal ends."""

    def evaluate(self, trainer, task) -> None:
        if trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        super().evaluate(trainer, task)


@pytest.mark.parametrize("callback", [Signals(signal.SIGINT), SlowPreview(every_n_steps=4)])
def test_the_last_step_before_a_signal_is_logged(tmp_path, callback):
    def train(version, *callbacks, ckpt_path=None):
        logger = RunLogger("x", str(tmp_path), version)
        trainer = tiny_trainer(tmp_path, *callbacks, logger=logger, max_steps=8, log_every_n_steps=1)
        trainer.fit(tiny_task(), Digits(32), ckpt_path=ckpt_path)

    train(0)
    with pytest.raises(SystemExit):
        train(1, callback)
    stopped = tmp_path / "x" / "version_1"
    train(2, ckpt_path=stopped / "checkpoints" / "last.ckpt")
    whole = rows(tmp_path / "x" / "version_0")
    assert rows(stopped) == whole[:4]
    assert rows(tmp_path / "x" / "version_2") == whole


def test_signals_are_whose_they_were_after_a_run_that_fails(tmp_path):
    fail = LambdaCallback(on_train_batch_end=Mock(side_effect=KeyError))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyError):
        tiny_trainer(tmp_path, LastCheckpoint(), fail, max_steps=2).fit(tiny_task(), Digits(32))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(("every", "keep", "kept"), [(4, 6, [6, 12]), (0, 5, [5, 10]), (5, 0, [])])
def test_checkpoints_are_kept_at_their_steps(tmp_path, every, keep, kept):
    fit(tmp_path, LastCheckpoint(every, keep), max_steps=13)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    before = ["previous.ckpt"] if every else []
    assert names == ["last.ckpt", *before, *(f"step_{step:08d}.ckpt" for step in kept)]
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 13


def test_a_step_of_accumulated_gradients_is_saved_once(tmp_path):
    class Counting(LastCheckpoint):
        saved: tuple[str, ...] = ()

        def _save(self, trainer, name="next.ckpt"):
            self.saved += (f"{name} {trainer.global_step}",)
            return super()._save(trainer, name)

    checkpoint = Counting(every_n_steps=4, keep_every_n_steps=3)
    fit(tmp_path, checkpoint, max_steps=9, data=Digits(32, device_batch_size=16))
    kept, last = (f"step_0000000{step}.ckpt {step}" for step in (3, 6, 9)), (f"next.ckpt {step}" for step in (4, 8, 9))
    assert sorted(checkpoint.saved) == sorted([*kept, *last])


def test_a_failing_evaluation_costs_no_step(tmp_path):
    class Broken(Preview):
        def evaluate(self, trainer, task) -> None:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fit(tmp_path, Broken(), LastCheckpoint(every_n_steps=100), max_steps=7)
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 7
