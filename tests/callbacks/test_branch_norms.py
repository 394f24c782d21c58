"""BranchNorms: a run records what its branches do and trains as without."""

import math
from functools import partial

import pytest
import torch
from conftest import Losses, state, tiny_net, tiny_task, tiny_trainer
from gloo import on_two_processes

from uvit_decay import history
from uvit_decay.callbacks import BranchNorms, Preview
from uvit_decay.callbacks.branches import draw
from uvit_decay.data import Digits
from uvit_decay.runtime.errors import UserError


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_run_records_and_draws_them_and_trains_as_without(tmp_path, pieces):
    losses, states = [], []
    for name, callbacks in (("with", [BranchNorms(3)]), ("without", [])):
        seen, task = Losses(), tiny_task(tiny_net(zero_init=False))
        trainer = tiny_trainer(tmp_path / name, seen, *callbacks, max_steps=7)
        trainer.fit(task, Digits(32, device_batch_size=32 // pieces))
        losses.append(seen.values)
        states.append(state(task))
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))
    measured = history.read(tmp_path / "with" / "branches.jsonl")
    assert [m.step for m in measured] == [3, 6]
    assert measured[0].metadata["branches"][-1] == "out_blocks.0.mlp.fc2"
    for k in range(6):
        x, f, ratio, update = (measured[0].values[f"{name}_{k}"] for name in ("x", "f", "ratio", "update"))
        assert ratio == pytest.approx(f / x)
        assert 0 < update < 0.1
    assert (tmp_path / "with" / "branches.png").stat().st_size > 1000


def test_an_update_is_the_length_of_the_step_over_that_of_the_weight(tmp_path):
    task = tiny_task(tiny_net(zero_init=False))
    before = task.net.out_blocks[0].mlp.fc2.weight.detach().clone()
    tiny_trainer(tmp_path, BranchNorms(1), max_steps=1).fit(task, Digits(32))
    moved = (task.net.out_blocks[0].mlp.fc2.weight.detach() - before).norm() / before.norm()
    (measured,) = history.read(tmp_path / "branches.jsonl")
    assert measured.values["update_5"] == pytest.approx(float(moved))


def test_what_starts_at_zero_has_no_relative_update(tmp_path):
    tiny_trainer(tmp_path, BranchNorms(1), max_steps=1).fit(tiny_task(tiny_net(zero_init=True)), Digits(32))
    (measured,) = history.read(tmp_path / "branches.jsonl")
    assert math.isnan(measured.values["update_5"])
    assert measured.values["f_5"] == 0


def measured_values(folder, pieces=1, **options):
    """Train for two steps and return what was measured at the second, of a global batch of 32 in `pieces` a process."""
    task = tiny_task(tiny_net(zero_init=False))
    data = Digits(32, device_batch_size=32 // pieces // options.get("devices", 1))
    tiny_trainer(folder, Preview(1, 2, every_n_steps=1), BranchNorms(1), max_steps=2, **options).fit(task, data)
    return history.read(folder / "branches.jsonl")[-1].values


def test_micro_batches_measure_what_one_batch_does(tmp_path):
    one, four = (measured_values(tmp_path / str(pieces), pieces) for pieces in (1, 4))
    assert four == pytest.approx(one, rel=1e-3)


def measured_on_rank(folder, rank):
    return measured_values(folder / "two", devices=2, strategy="ddp")


@pytest.mark.slow
def test_two_processes_measure_what_one_does(programs, tmp_path):
    two, _ = on_two_processes(programs, partial(measured_on_rank, tmp_path), tmp_path)
    assert two == pytest.approx(measured_values(tmp_path / "one"), rel=1e-3)


def test_a_history_without_its_branches_is_one_line(tmp_path):
    measured = [history.Measurement(1, 0.1, 32, {"x_0": 1.0}, {})]
    with pytest.raises(UserError, match=r"branches\.png.*branches"):
        draw(measured, tmp_path / "branches.png")
