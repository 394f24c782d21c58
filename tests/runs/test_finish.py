"""A run that was killed between its last checkpoint and its last results: a resumed run makes what is missing."""

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
RESULTS = ("probes.jsonl", "probes.csv", "samples.png", "samples/step_00000003.png")


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of a run that nothing kills."""
    with pytest.MonkeyPatch.context() as patch:
        (run,) = launch(patch, tmp_path_factory.mktemp("whole"))
    return run


@pytest.mark.parametrize("callback", [Preview, LinearProbes])
def test_missing_results_are_made_by_the_same_command(callback, whole, command, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        kill_at_the_end(patch, callback)
        with pytest.raises(Killed):
            command()
    (finished,) = command()
    find_line(caplog.messages, "step 3", callback.__name__)
    for name in RESULTS:
        assert (finished / name).read_bytes() == (whole / name).read_bytes(), name
    ours, theirs = (torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (finished, whole))
    assert ours["global_step"] == theirs["global_step"] == 3
    for name, value in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][name], value)
    assert [json.loads(line)["step"] for line in (finished / "probes.jsonl").read_text().splitlines()] == [2, 3]
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    caplog.clear()
    assert command() == [finished]
    find_line(caplog.messages, "step 3", "--trainer.max_steps")
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_a_longer_run_first_makes_the_missing_results_of_a_shorter_one(command, monkeypatch):
    with monkeypatch.context() as patch:
        kill_at_the_end(patch, LinearProbes)
        with pytest.raises(Killed):
            command()
    (run,) = command("--trainer.max_steps=4")
    assert [json.loads(line)["step"] for line in (run / "probes.jsonl").read_text().splitlines()] == [2, 3, 4]


def test_a_second_kill_costs_no_result_that_is_recorded(whole, command, monkeypatch):
    with monkeypatch.context() as patch:
        kill_at_the_end(patch, Preview)
        with pytest.raises(Killed):
            command()
    with monkeypatch.context() as patch:
        kill_at_the_end(patch, LinearProbes)
        with pytest.raises(Killed):
            command()
        kill_at_the_end(patch, Preview)  # which is not made again
    (last,) = command()
    for name in RESULTS:
        assert (last / name).read_bytes() == (whole / name).read_bytes(), name
