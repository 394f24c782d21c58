"""A run that goes on begins with what the run before did not come to do at its last step."""

import json

import pytest
from conftest import tiny_task, tiny_trainer
from lightning.pytorch import Callback
from small_training import rows

from uvit_decay import history
from uvit_decay.callbacks import LastCheckpoint, LinearProbes, Preview, RunLogger, Summary
from uvit_decay.callbacks.catching_up import finishing
from uvit_decay.data import Digits
from uvit_decay.runtime.errors import RunEnded

EVERY = {"every_n_steps": 5, "at_end": False}


class Fails(Callback):
    """Fails at a step: before its validation, or with all else done before the probes."""

    def __init__(self, step: int, hook: str) -> None:
        self.step = step
        setattr(self, hook, self._fail)

    def _fail(self, trainer, *_) -> None:
        if trainer.global_step == self.step:
            raise ValueError("on purpose")


def a_run(folder, version, *more, ckpt_path=None, steps=12, at_end=False):
    """The folder of a run that validates and is evaluated after every five steps."""
    every = {**EVERY, "at_end": at_end}
    probes = LinearProbes(times=(0.1,), max_train=50, max_test=50, **every)
    callbacks = [Summary(), *more, Preview(rows=1, **every), probes, LastCheckpoint(every_n_steps=5)]
    options = {"logger": RunLogger("x", str(folder), version), "limit_val_batches": 1, "val_check_interval": 5}
    options |= {"log_every_n_steps": 1, "check_val_every_n_epoch": None, "max_steps": steps}
    trainer = finishing(tiny_trainer(folder, *callbacks, **options))
    trainer.fit(tiny_task(), Digits(32), ckpt_path=ckpt_path)
    return folder / "x" / f"version_{version}"


@pytest.mark.parametrize(
    ("step", "steps", "hook"),
    [(5, 12, "on_validation_start"), (10, 12, "on_validation_end"), (10, 10, "on_validation_start")],
)
def test_validation_and_numbers_of_the_last_step_are_made_up_for(tmp_path, hook, step, steps):
    whole = a_run(tmp_path, 0, steps=steps)
    with pytest.raises(ValueError, match="on purpose"):
        a_run(tmp_path, 1, Fails(step, hook), steps=steps)
    checkpoint = tmp_path / "x" / "version_1" / "checkpoints" / "last.ckpt"
    rest = a_run(tmp_path, 2, ckpt_path=checkpoint, steps=steps)
    assert rows(rest) == rows(whole)
    assert (rest / history.PROBES).read_text() == (whole / history.PROBES).read_text()


@pytest.mark.parametrize("done", [True, False])
def test_evaluations_of_the_last_step_are_made_once(tmp_path, done):
    """The run before has made its pictures, or they are missing; its probes are there."""
    first = a_run(tmp_path, 0, steps=7, at_end=True)
    if not done:
        (first / "samples" / "step_00000007.png").unlink()
    arguments = {"ckpt_path": first / "checkpoints" / "last.ckpt", "steps": 7, "at_end": True}
    if done:
        with pytest.raises(RunEnded, match="the checkpoint is at step 7, the end: set --trainer.max_steps higher"):
            a_run(tmp_path, 1, **arguments)
        return
    second = a_run(tmp_path, 1, **arguments)
    assert [json.loads(line)["step"] for line in (second / history.PROBES).open()] == [5, 7]
    for name in ("samples.png", "samples/step_00000007.png", "probes.csv", "probes.png", "checkpoints/last.ckpt"):
        assert (second / name).exists(), name
