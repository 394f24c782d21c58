"""BranchNorms: a run records what its branches do and trains as without."""

import csv
import math
from functools import partial

import pytest
import torch
from conftest import Losses, state, tiny_net, tiny_task, tiny_trainer
from gloo import on_two_processes

from uvit_decay.callbacks import BranchNorms, Preview
from uvit_decay.callbacks.branches import BranchTerms, draw
from uvit_decay.data import Digits
from uvit_decay.decay import mixing_matrix
from uvit_decay.runs import history
from uvit_decay.tasks.parallel.compilation import compile_net
from uvit_decay.terminal.errors import UserError


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


def test_compiled_blocks_run_uncompiled_while_they_are_measured():
    net, calls = tiny_net(zero_init=False), []

    def backend(graph, inputs):
        def call(*values):
            calls.append(graph)
            return graph(*values)

        return call

    compile_net(net, backend, by_block=True)
    inputs = torch.randn(2, 1, 8, 8), torch.full((2,), 0.5), torch.tensor([0, 1])
    net(*inputs)
    before = len(calls)
    terms = BranchTerms(net)
    terms.start()
    net(*inputs)
    assert len(calls) == before > 0
    assert terms.sums.isfinite().all()
    assert terms.sums.all()
    terms.stop()
    net(*inputs)
    assert len(calls) > before


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


LEARNED = ("attnres", "attnres-2", "dar-t", "learnable", "layerscale")
NETS = {"linear": dict(), **{name: dict(schedule=name, alpha_min=1.0) for name in LEARNED}}


def build_net(name):
    """Return a network of tokens that differ in what they read."""
    net = tiny_net(zero_init=False, **NETS[name])
    for parameter in net.depth_attention.parameters() if hasattr(net, "depth_attention") else ():
        torch.nn.init.normal_(parameter)
    return net


def read_mixing(path):
    """Return the readers, the sources and the numbers of a mixing matrix."""
    header, *rows = csv.reader(path.open())
    return [row[0] for row in rows], header[1:], [list(map(float, row[1:])) for row in rows]


class Undrawn(BranchNorms):
    """Measures without figures, which take longer than the training; the test above draws them."""

    def on_train_end(self, trainer, task):
        pass


def measured_values(folder, pieces=1, net="linear", **options):
    """Train for two steps and return what was measured at the second, of a global batch of 32 in `pieces` a process."""
    task = tiny_task(build_net(net))
    data = Digits(32, device_batch_size=32 // pieces // options.get("devices", 1))
    tiny_trainer(folder, Preview(1, 2, every_n_steps=1), Undrawn(1), max_steps=2, **options).fit(task, data)
    values = history.read(folder / "branches.jsonl")[-1].values
    if net in LEARNED:
        *_, matrix = read_mixing(folder / "mixing" / "step_00000002.csv")
        values |= {f"mixing_{i}_{j}": value for i, row in enumerate(matrix) for j, value in enumerate(row)}
    return values


@pytest.mark.parametrize("net", ["linear", "attnres", "dar-t"])
def test_micro_batches_measure_what_one_batch_does(net, tmp_path):
    one, four = (measured_values(tmp_path / str(pieces), pieces, net) for pieces in (1, 4))
    assert four == pytest.approx(one, rel=1e-3)


def measured_on_rank(folder, net, rank):
    return measured_values(folder / "two", net=net, devices=2, strategy="ddp")


@pytest.mark.slow
@pytest.mark.parametrize("net", ["linear", "attnres-2"])
def test_two_processes_measure_what_one_does(net, programs, tmp_path):
    two, _ = on_two_processes(programs, partial(measured_on_rank, tmp_path, net), tmp_path)
    assert two == pytest.approx(measured_values(tmp_path / "one", net=net), rel=1e-3)


@pytest.mark.parametrize("net", LEARNED)
def test_the_mixing_matrix_of_a_step_is_that_of_its_batch(net, tmp_path):
    """The weights are those before the step, whose forward pass is measured."""
    task = tiny_task(build_net(net), lr=1e-12)
    seen = []
    task.net.register_forward_pre_hook(lambda _, args: seen.append(args))
    trainer = tiny_trainer(tmp_path, BranchNorms(1), max_steps=1)
    trainer.fit(task, Digits(32))
    ends, merge = task.net.branch_ends(), "merge before out_blocks.0.attn.proj"
    readers, sources, found = read_mixing(tmp_path / "mixing" / "step_00000001.csv")
    assert readers == [*ends, "output"]
    assert sources == ["embeddings", *ends, merge]
    expected = mixing_matrix(task.net.eval(), *seen[0])
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-5, atol=1e-7)
    assert (tmp_path / "mixing.png").stat().st_size > 1000


def test_fixed_shortcuts_have_no_files_of_mixing(tmp_path):
    measured_values(tmp_path)
    assert not [*tmp_path.glob("mixing*")]


def test_a_history_without_its_branches_is_one_line(tmp_path):
    measured = [history.Measurement(1, 0.1, 32, {"x_0": 1.0}, {})]
    with pytest.raises(UserError, match=r"branches\.png.*branches"):
        draw(measured, tmp_path / "branches.png")
