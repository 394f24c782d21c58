"""Steps that are not finite are skipped: they change nothing, are counted, and one too many stops the run."""

import csv
from dataclasses import replace

import pytest
import torch
from conftest import same, tiny_task
from lightning.pytorch.loggers import CSVLogger
from long_runs import ADAMW, TASKS, Spoil, changed, trained
from runs import StopAt

from uvit_decay.callbacks import LastCheckpoint
from uvit_decay.runtime.errors import UserError
from uvit_decay.tasks.base import Optimization

WAYS = [("adamw", pieces, kind) for pieces in (1, 2) for kind in ("images", "loss", "gradient")]
WAYS += [("sgd", 1, "images"), ("sgd", 2, "loss")]
WAYS += [("lars and a batch norm", 2, "images"), ("lars and a batch norm", 1, "gradient")]


@pytest.mark.parametrize(("name", "pieces", "kind"), WAYS)
def test_a_skipped_step_changes_nothing_and_counts_as_a_step(tmp_path, name, pieces, kind):
    _, states, _ = trained(tmp_path, TASKS[name](), Spoil({0: kind, 3: kind}), pieces=pieces)
    assert states.skipped == [1, 1, 1, 2, 2, 2]
    assert changed(states, 3) == set()
    assert not any(part.startswith("moments") for part in changed(states, 0))
    assert all(torch.equal(states.after[0][key], value) for key, value in TASKS[name]().net.state_dict().items())
    for step in (1, 2, 4, 5):
        assert any(part.startswith("moments") for part in changed(states, step))
    assert all(torch.isfinite(value).all() for value in states.after[-1].values())
    assert len(set(states.rates[:5])) == 5  # the schedule goes on
    undisturbed = trained(tmp_path, TASKS[name](), Spoil({0: kind}), pieces=pieces, max_steps=3)[1]
    assert all(same(a, b) for a, b in zip(undisturbed.after, states.after, strict=False))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_without_such_steps_is_the_run_that_skips_none(tmp_path, precision):
    options = {"pieces": 2, "gradient_clip_val": 0.05, "precision": precision}
    losses, states, _ = trained(tmp_path / "a", TASKS["adamw"](), **options)
    wanted = trained(tmp_path / "b", TASKS["adamw"](replace(ADAMW, skip_non_finite=0)), **options)
    assert losses == wanted[0]
    assert same(states.after[-1], wanted[1].after[-1])
    assert states.skipped[-1] == 0


def test_one_step_too_many_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    spoil = Spoil({2: "images", 4: "loss", 5: "gradient", 7: "gradient"})
    message = r"^the loss or its gradient is not finite at step 7, after 3 skipped steps \(learning rate 0.0008\); the"
    with pytest.raises(UserError, match=message):
        trained(tmp_path, TASKS["adamw"](), spoil, LastCheckpoint(every_n_steps=3), max_steps=9)
    kept = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert (kept["global_step"], kept["skipped_steps"]) == (6, 3)
    assert {int(moments["step"]) for moments in kept["optimizer_states"][0]["state"].values()} == {3}


def test_a_resumed_run_skips_as_the_run_that_was_not_stopped_and_keeps_the_count(tmp_path):
    spoil = Spoil({0: "images", 5: "loss", 8: "gradient"})
    losses, states, _ = trained(tmp_path / "whole", TASKS["adamw"](), spoil, max_steps=10)
    for stop in (1, 6):  # after the first one, and after the second one
        half = tmp_path / f"half {stop}"
        trained(half, TASKS["adamw"](), spoil, StopAt(stop), max_steps=10)
        checkpoint = half / "checkpoints" / "last.ckpt"
        rest = trained(tmp_path / "rest", TASKS["adamw"](), spoil, max_steps=10, ckpt_path=checkpoint)
        assert str(rest[0]) == str(losses[stop:])  # NaN is not equal to itself
        assert same(rest[1].after[-1], states.after[-1])
        assert rest[1].skipped == states.skipped[stop:]
    fewer = TASKS["adamw"](replace(ADAMW, skip_non_finite=2))
    with pytest.raises(UserError, match="at step 8, after 2 skipped steps"):
        trained(tmp_path / "fewer", fewer, spoil, max_steps=10, ckpt_path=checkpoint)


def test_the_number_of_skipped_steps_is_logged(tmp_path):
    logger = CSVLogger(tmp_path, name="log")
    options = {"logger": logger, "log_every_n_steps": 2}
    _, _, trainer = trained(tmp_path, TASKS["adamw"](), Spoil({1: "images", 4: "loss"}), **options)
    with open(tmp_path / "log" / "version_0" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["train/skipped_steps"] for row in rows] == ["1.0", "1.0", "2.0"]
    assert [row["train/loss"] == "nan" for row in rows] == [True, False, False]
    assert trainer.progress_bar_metrics["train/skipped_steps"] == 2.0


def test_without_the_option_nothing_is_counted_or_stored(tmp_path):
    task = tiny_task()
    trainer = trained(tmp_path, task, max_steps=2, log_every_n_steps=1)[2]
    assert "train/skipped_steps" not in trainer.callback_metrics
    assert "skipped_steps" not in torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert task.skips.now is None


def test_a_count_that_is_none_is_refused(tmp_path):
    trained(tmp_path / "a", TASKS["adamw"](), max_steps=1)
    path = tmp_path / "a" / "checkpoints" / "last.ckpt"
    torch.save({**torch.load(path, weights_only=True), "skipped_steps": "a word"}, path)
    with pytest.raises(UserError, match="skipped_steps is a str, not a int"):
        trained(tmp_path / "b", TASKS["adamw"](), max_steps=2, ckpt_path=path)
    with pytest.raises(UserError, match="skip_non_finite must be at least 0"):
        Optimization(skip_non_finite=-1)
