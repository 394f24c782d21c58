"""What keeps long runs alive, on two processes: what goes wrong on one of them is dealt with by both alike."""

from functools import partial

import pytest
import torch
from conftest import state, tiny_task
from gloo import lightning_rank, on_two_processes
from long_runs import CLIP, TASKS, Spoil, changed, clipped, ended, trained

from uvit_decay.tasks.sharding import Sharded, full, spare_copies

STRATEGIES = {"fsdp": Sharded, "ddp": lambda: "ddp"}
SPOILT = {1: "images", 3: "loss"}
SKIPPING = [("adamw", "fsdp"), ("lars and a batch norm", "ddp")]


def clip_gradients(folder):
    """Norms of clipped runs, whose weights are saved."""
    norms = {}
    for algorithm in CLIP:
        for name, strategy in STRATEGIES.items():
            task, trainer = clipped(folder, algorithm, devices=2, strategy=strategy())
            weights = {key: full(value).clone() for key, value in state(task).items()}
            torch.save(weights, folder / f"{algorithm} {name} {trainer.global_rank}.pt")
            norms[f"{algorithm} {name}"] = float(trainer.callback_metrics["train/grad_norm"])
    return norms


def skip_steps(folder, rank):
    """Counts of skipped steps of runs that are spoilt on rank 1, and what changed at those steps."""
    found = {}
    for name, strategy in SKIPPING:
        options = {"devices": 2, "strategy": STRATEGIES[strategy]()}
        _, states, _ = trained(folder / f"{name} {strategy}", TASKS[name](), Spoil(SPOILT, rank=1), pieces=2, **options)
        torch.save(states.after[-1], folder / f"{name} {strategy} {rank}.pt")
        found[f"{name} {strategy}"] = [states.skipped, [sorted(changed(states, step)) for step in SPOILT]]
    return found


def work(folder, rank):
    lightning_rank(rank)
    spare_copies()
    found = {"clip": clip_gradients(folder), "skip": skip_steps(folder, rank)}
    # The last run: afterwards the processes no longer talk.
    return {**found, "memory": ended(folder, tiny_task(), rank=1, devices=2, strategy="ddp")}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The folder of all runs, and what each rank found in them."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, on_two_processes(partial(work, folder), folder)


def saved(folder, name):
    return [torch.load(folder / f"{name} {rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", CLIP)
def test_clipping_of_two_processes_and_of_shards_is_that_of_one(ranks, tmp_path, algorithm):
    folder, (ours, theirs) = ranks
    assert ours["clip"] == theirs["clip"]
    task, trainer = clipped(tmp_path, algorithm)
    norm = float(trainer.callback_metrics["train/grad_norm"])
    for strategy in STRATEGIES:
        assert ours["clip"][f"{algorithm} {strategy}"] == pytest.approx(norm)
        first, second = saved(folder, f"{algorithm} {strategy}")
        for key, value in state(task).items():
            assert torch.equal(first[key], second[key]), key
            torch.testing.assert_close(first[key], value, rtol=0, atol=2e-5, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), SKIPPING)
def test_what_is_not_finite_on_one_process_is_skipped_by_both(ranks, name, strategy):
    folder, found = ranks
    for rank in found:
        counts, names = rank["skip"][f"{name} {strategy}"]
        assert counts == [0, 1, 1, 2, 2, 2]
        assert names == [[], []]
    first, second = saved(folder, f"{name} {strategy}")
    for key, value in first.items():
        assert torch.isfinite(value).all(), key
        assert "running" in key or torch.equal(value, second[key]), key


@pytest.mark.slow
def test_a_process_that_runs_out_of_memory_says_so_and_the_other_does_not_wait_for_it(ranks):
    waiting, exhausted = (found["memory"] for found in ranks[1])
    assert exhausted.startswith("cpu is out of memory at step 2")
    assert "set --data.device_batch_size 8 (pieces of 16 images now)" in exhausted
    assert "onnection" in waiting
