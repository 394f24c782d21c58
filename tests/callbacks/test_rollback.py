"""Loss spikes: the run goes back to an earlier state, passes over the batches of the spike and goes on."""

import csv
import math

import pytest
import torch
from conftest import Losses, tiny_net, tiny_trainer
from lightning.pytorch.loggers import CSVLogger
from long_runs import EVERY, Spoil, differences, spiking, stored
from runs import StopAt

from uvit_decay.callbacks import EMA, LastCheckpoint, Rollback
from uvit_decay.data import Digits
from uvit_decay.runtime.errors import UserError
from uvit_decay.tasks import DiffusionTask
from uvit_decay.tasks.base import Optimization

SPIKE = 12  # the step, from 0; it is found after 14 steps, when the states of steps 10 and 12 are kept


@pytest.mark.parametrize("pieces", [1, 2])
def test_the_run_goes_back_and_passes_over_the_batches_of_the_spike(tmp_path, caplog, pieces):
    spike, rollback = Spoil({SPIKE: "spike"}), Rollback(EVERY)
    with caplog.at_level("INFO"):
        spiking(tmp_path, spike, rollback, pieces=pieces)
    (line,) = [text for text in caplog.messages if "spike" in text]
    assert line.startswith("loss spike at step 14: the mean of 2 steps is ")
    assert line.endswith("; back to the weights of step 10, without the batches since then (1 of at most 3 times)")
    before, after = stored(tmp_path, 10), stored(tmp_path, 14)
    changed = differences(before, after, ("state_dict", "optimizer_states", "callbacks"))
    assert changed == {".optimizer_states.0.param_groups.0.lr", ".callbacks.EMA.updates"}  # which go on
    assert spike.batches == [step for step in range(16) for _ in range(pieces)]
    assert len(rollback.means) == 7  # without that of the spike
    assert max(rollback.means) < 2 * min(rollback.means)


def test_means_are_those_of_all_pieces(tmp_path):
    losses, rollback = Losses(), Rollback(EVERY)
    spiking(tmp_path, losses, rollback, max_steps=6, pieces=2)
    values = 2 * torch.tensor(losses.values, dtype=torch.float64)  # Lightning divides the losses of pieces
    assert rollback.means == pytest.approx(values.reshape(3, 4).mean(dim=1).tolist(), rel=1e-12)


def test_without_a_spike_the_run_is_the_run_that_cannot_go_back(tmp_path):
    spiking(tmp_path / "a", max_steps=14)
    without = LastCheckpoint(1000)
    torch.manual_seed(0)
    optim = Optimization(1e-3, (0.9, 0.99), 0.03, warmup_steps=30)
    trainer = tiny_trainer(tmp_path / "b", EMA(0.9), without, max_steps=14)
    trainer.fit(DiffusionTask(tiny_net(), optim=optim), Digits(32))
    parts = ("state_dict", "optimizer_states", "callbacks")
    assert differences(stored(tmp_path / "a"), stored(tmp_path / "b"), parts) == set()


def test_a_resumed_run_goes_back_as_the_run_that_was_not_stopped(tmp_path):
    spikes = {SPIKE: "spike", 18: "spike"}
    spiking(tmp_path / "whole", Spoil(spikes), max_steps=20)
    wanted = stored(tmp_path / "whole")
    assert wanted["rollback"]["count"] == 2
    for stop in (13, 14):  # in the interval of the spike, and when only one state is kept
        spiking(tmp_path / f"half {stop}", Spoil(spikes), StopAt(stop), max_steps=20)
        path = tmp_path / f"half {stop}" / "checkpoints" / "last.ckpt"
        assert torch.load(path, weights_only=True)["global_step"] == stop
        spiking(tmp_path / f"rest {stop}", Spoil(spikes), max_steps=20, ckpt_path=path)
        assert differences(stored(tmp_path / f"rest {stop}"), wanted) == set()


def test_one_spike_too_many_stops_the_run(tmp_path):
    message = (
        r"^loss spike at step 16: the mean of 2 steps is \S+, usual is \S+; the run went back 1 times, as often as "
        r"Rollback may: lower --model.optim.lr, set --trainer.gradient_clip_val or go on from an earlier checkpoint$"
    )
    with pytest.raises(UserError, match=message):
        spiking(tmp_path, Spoil({SPIKE: "spike", 14: "spike"}), Rollback(EVERY, times=1))
    assert stored(tmp_path, 14)["rollback"]["count"] == 1
    assert not (tmp_path / "checkpoints" / "step_00000016.ckpt").exists()


def test_skipped_steps_are_no_spikes(tmp_path):
    rollback = Rollback(EVERY)
    spiking(tmp_path, Spoil({11: "images", 12: "images", 13: "loss"}), rollback, skip_non_finite=3, max_steps=14)
    assert rollback.count == 1  # an interval without a finite loss is one
    assert len(rollback.means) == 6
    assert all(math.isfinite(mean) for mean in rollback.means)


def test_going_back_is_logged(tmp_path):
    logger = CSVLogger(tmp_path, name="log")
    spiking(tmp_path, Spoil({SPIKE: "spike"}), logger=logger)
    with open(tmp_path / "log" / "version_0" / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("train/rollbacks")]
    assert [(row["step"], row["train/rollbacks"]) for row in rows] == [("14", "1.0")]


DAMAGE = {
    "a small tensor": lambda kept: kept["states"][0]["tensors"].update({"net.alphas": torch.zeros(1)}),
    "a bad number": lambda kept: kept["states"][1]["tensors"]["net.norm.bias"].fill_(math.nan),
    "a word": lambda kept: kept["states"][0]["tensors"].update({"net.norm.bias": "a word"}),
    "no step": lambda kept: kept["states"][0].pop("step"),
    "no states": lambda kept: kept.update(states=3),
    "means of words": lambda kept: kept.update(means=["x"]),
    "a negative count": lambda kept: kept.update(count=-1),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_states_are_refused_in_one_line(tmp_path, name):
    path = tmp_path / "a" / "checkpoints" / "last.ckpt"
    if name == next(iter(DAMAGE)) or not path.exists():
        spiking(tmp_path / "a", max_steps=4)
    contents = torch.load(path, weights_only=True)
    DAMAGE[name](contents["rollback"])
    torch.save(contents, path)
    with pytest.raises(UserError, match=r"Rollback .*checkpoint|count must be at least 0"):
        spiking(tmp_path / "b", max_steps=6, ckpt_path=path)


def test_states_of_other_averages_are_kept_anew(tmp_path, caplog):
    spiking(tmp_path / "a", max_steps=4)
    rollback = Rollback(EVERY)
    with caplog.at_level("INFO"):
        options = {"decays": (0.9, (0.5,)), "ckpt_path": tmp_path / "a" / "checkpoints" / "last.ckpt"}
        spiking(tmp_path / "b", rollback, max_steps=6, **options)
    assert "Rollback keeps its states anew: this run has other averages than the checkpoint" in caplog.messages
    assert ([state.step for state in rollback.states], len(rollback.means)) == ([6], 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 1.0}, "factor of Rollback must be above 1 and finite, got 1.0"),
        ({"factor": math.nan}, "factor of Rollback"),
        ({"every_n_steps": 0}, "every_n_steps must be at least 1"),
        ({"window": 4}, "window must be at least 5"),
        ({"times": -1}, "times must be at least 0"),
    ],
)
def test_options_out_of_range_are_one_line(options, message):
    with pytest.raises(UserError, match=message):
        Rollback(**options)
