"""Results that a kill at the end of a run left out: they are named, or made by a longer run."""

import json
from functools import partial

import pytest
import torch
import yaml
from conftest import digits_config, train
from refusals import find_line

from uvit_decay.callbacks import LinearProbes, Preview

TINY = ["--config=small.yaml", "--model.net.dim=16", "--model.net.depth=2", "--trainer.limit_val_batches=0"]
TINY += ["--model.sampling.steps=2", "--trainer.log_every_n_steps=1", "--ckpt_path=auto"]
KEPT = {"EMA": {}, "Preview": {"rows": 1}, "LastCheckpoint": {}}
KEPT |= {"LinearProbes": {"every_n_steps": 2, "times": [0.1], "max_train": 60, "max_test": 40}}


class Killed(BaseException):
    """The end of a process that nobody handles."""


def kill_at_the_end(monkeypatch, callback):
    """Kill a run in the evaluation of a callback at the step 3."""
    evaluate = callback.evaluate

    def evaluate_or_die(self, trainer, task):
        if trainer.global_step == 3:
            raise Killed
        evaluate(self, trainer, task)

    monkeypatch.setattr(callback, "evaluate", evaluate_or_die)


def launch(monkeypatch, folder, length="--trainer.max_steps=3"):
    """Run the same command of three steps in a folder; return its run folders."""
    content = digits_config(**KEPT)
    callbacks = content["trainer"]["callbacks"]
    content["trainer"]["callbacks"] = [each for each in callbacks if each["class_path"].rpartition(".")[2] in KEPT]
    folder.mkdir(exist_ok=True)
    (folder / "small.yaml").write_text(yaml.safe_dump(content))
    train(monkeypatch, folder, "fit", *TINY, length)
    return sorted((folder / "runs" / "digits").iterdir())


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return a function that runs the command in a folder of the test."""
    return partial(launch, monkeypatch, tmp_path / "killed")


@pytest.mark.parametrize(
    ("callback", "program"), [(Preview, "sample.py --ckpt"), (LinearProbes, "evaluate.py probe --ckpt")]
)
def test_missing_results_are_named_with_their_command(callback, program, command, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        kill_at_the_end(patch, callback)
        with pytest.raises(Killed):
            command()
    caplog.clear()
    (run,) = command()
    find_line(caplog.messages, "nothing is left to do", "step 3", "--trainer.max_steps")
    line = find_line(caplog.messages, "step 3 is missing", program)
    checkpoint = run / "checkpoints" / "last.ckpt"
    assert str(checkpoint.relative_to(run.parents[2])) in line
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 3


def test_a_complete_run_lacks_no_result(command, caplog):
    (run,) = command()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    caplog.clear()
    assert command() == [run]
    assert not [message for message in caplog.messages if "is missing" in message]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_longer_run_first_makes_the_missing_results_of_a_shorter_one(command, monkeypatch):
    with monkeypatch.context() as patch:
        kill_at_the_end(patch, LinearProbes)
        with pytest.raises(Killed):
            command()
    (run,) = command("--trainer.max_steps=4")
    assert [json.loads(line)["step"] for line in (run / "probes.jsonl").read_text().splitlines()] == [2, 3, 4]
