"""Auxiliary losses: what they see, what they change, and that pieces, processes and compilers make no difference."""

from functools import partial

import pytest
import torch
from conftest import same, tiny_net, tiny_task, tiny_trainer, train
from gloo import on_two_processes
from lightning.pytorch import Callback
from refusals import find_line, refused
from runs import StopAt, fit
from small_mae import mae_task, small_mae
from torch import nn

from uvit_decay.checkpoint import load
from uvit_decay.data import Digits
from uvit_decay.diffusion.noise_path import Linear
from uvit_decay.nn import SiT
from uvit_decay.tasks import AuxiliaryLoss
from uvit_decay.tasks.parallel.sharding import Sharded
from uvit_decay.terminal.errors import UserError


class Norm(AuxiliaryLoss):
    """The mean square of all states."""

    def forward(self, states, batch, times):
        return torch.stack([state.float().square().mean() for state in states.values()]).mean()


class Aligned(AuxiliaryLoss):
    """A projection of patch tokens that predicts the mean of the images; it remembers what it was given."""

    def __init__(self, layers=("mid_block",), weight=1.0) -> None:
        super().__init__(layers, weight)
        self.seen = []

    def bind(self, net) -> None:
        super().bind(net)
        torch.manual_seed(2)
        self.projector = nn.Linear(net.dim, 1)

    def forward(self, states, batch, times):
        self.seen.append((list(states), batch, times))
        means = [self.projector(state[:, self.num_prefix_tokens :]).mean(dim=(1, 2)) for state in states.values()]
        return (torch.stack(means).mean(dim=0).float() - batch.images.mean(dim=(1, 2, 3))).square().mean()


def sit_net(**options):
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": 2, "heads": 2, "num_classes": 10, "alpha_min": 0.8}
    return SiT(8, 2, 1, **sizes, wiring="decayed", **options)


def sit(*losses, **options):
    return tiny_task(sit_net(**options), path=Linear(), prediction="velocity", auxiliary=[*losses])


class Logged(Callback):
    """All that is logged at the end of each step."""

    def __init__(self) -> None:
        self.steps = []

    def on_train_batch_end(self, trainer, *_) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train_logged(folder, task, steps=3, micro=None, **options):
    logged = Logged()
    trainer = tiny_trainer(folder, logged, max_steps=steps, log_every_n_steps=1, **options)
    trainer.fit(task, Digits(32, device_batch_size=micro))
    return logged.steps


@pytest.mark.parametrize("make", [tiny_net, sit_net])
def test_output_and_states_are_of_one_forward_pass(make):
    net, x, t = make().eval(), torch.randn(3, 1, 8, 8), torch.tensor([0.1, 0.5, 0.9])
    output, states = net(x, t, layers=(0, 2))
    assert torch.equal(output, net(x, t))
    expected = list(net.forward_intermediates(x, t))
    assert [torch.equal(*pair) for pair in zip(states, (expected[0], expected[2]), strict=True)] == [True, True]


def test_states_of_an_mae_are_those_of_visible_tokens_and_have_no_times(tmp_path):
    loss = Aligned(["blocks.1"])
    steps = train_logged(tmp_path, mae_task(auxiliary=[loss]))
    assert (loss.seen[0][2], loss.num_prefix_tokens) == (None, 1)
    assert all("train/aux/aligned" in values for values in steps)
    net, noise = small_mae().eval(), torch.rand(2, 16)
    output, states = net(torch.randn(2, 1, 8, 8), noise, 0.75, layers=(1,))
    assert [value.shape for value in output] == [(2, 16, 4), (2, 16)]
    assert [state.shape for state in states] == [(2, 5, 16)]


def test_a_loss_sees_its_layers_the_images_and_the_times_and_its_projector_learns(tmp_path):
    loss = Aligned(["mid_block", 1])
    task = tiny_task(auxiliary=[loss])
    assert loss.num_prefix_tokens == 2
    before = loss.projector.weight.detach().clone()
    train_logged(tmp_path, task)
    names, batch, times = loss.seen[0]
    assert names == ["in_blocks.0", "mid_block"]
    assert batch.images.shape == (32, 1, 8, 8)
    assert times.shape == (32,)
    assert not torch.equal(loss.projector.weight, before)


def test_the_loss_of_a_step_is_the_weighted_sum_and_each_is_logged_alone(tmp_path):
    plain = train_logged(tmp_path / "a", tiny_task(), steps=1)
    with_all = train_logged(tmp_path / "b", tiny_task(auxiliary=[Norm([1], 0.5), Norm([2], 0.0)]), steps=1)
    assert with_all[0]["train/loss"] == plain[0]["train/loss"]
    assert {"train/aux/norm", "train/aux/norm_2"} <= with_all[0].keys()
    task = tiny_task(auxiliary=[Norm([1], 0.5)])
    losses = fit(tmp_path / "c", max_steps=1, task=task)[0]
    assert losses[0] == pytest.approx(plain[0]["train/loss"] + 0.5 * with_all[0]["train/aux/norm"], rel=1e-6)


class Named(Norm):
    """A loss of this name and value."""

    def __init__(self, name, value) -> None:
        super().__init__()
        self.given, self.value = name, value

    @property
    def name(self):
        return self.given

    def forward(self, states, batch, times):
        return torch.tensor(self.value)


def test_losses_of_equal_names_get_names_that_are_free():
    names = ["a", "a_2", "a", "a", "a_2"]
    losses = tiny_task(auxiliary=[Named(name, 10.0**i) for i, name in enumerate(names)]).auxiliary
    values = losses.values([torch.zeros(2, 3, 4)] * len(losses.layers), None, None)
    assert list(values) == ["a", "a_2", "a_3", "a_4", "a_2_2"]
    assert losses.sum_weighted(values) == 11111.0


def test_the_loss_of_validation_is_the_loss_of_the_task(tmp_path):
    options = {"limit_val_batches": 2, "val_check_interval": 1, "check_val_every_n_epoch": None}
    values = []
    for weight in (0.0, 5.0):
        task = tiny_task(auxiliary=[Norm(None, weight)], lr=1e-9)
        trainer = tiny_trainer(tmp_path / str(weight), max_steps=1, **options)
        trainer.fit(task, Digits(32))
        values.append(float(trainer.callback_metrics["val/loss"]))
    assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_pieces_train_as_the_whole_batch_does(tmp_path):
    whole = train_logged(tmp_path / "whole", tiny_task(auxiliary=[Aligned()]))
    pieces = train_logged(tmp_path / "pieces", tiny_task(auxiliary=[Aligned()]), micro=8)[3::4]
    for name in ("train/loss", "train/aux/aligned"):
        assert [s[name] for s in pieces] == pytest.approx([s[name] for s in whole], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "training"),
    [({"checkpointing": True}, {}), ({}, {"precision": "bf16-mixed"})],
    ids=["checkpointing", "bf16"],
)
def test_recomputation_and_bf16_train_as_otherwise(tmp_path, options, training):
    plain = train_logged(tmp_path / "plain", sit(Norm(), Aligned(["dec_blocks.0"])))
    other = train_logged(tmp_path / "other", sit(Norm(), Aligned(["dec_blocks.0"]), **options), **training)
    for name in ("train/loss", "train/aux/norm", "train/aux/aligned"):
        expected = [s[name] for s in plain]
        assert [s[name] for s in other] == pytest.approx(expected, rel=0.02 if training else 1e-5)


@pytest.mark.parametrize("by_block", [True, False])
def test_a_compiled_network_gives_the_same_states(by_block, monkeypatch):
    import jaxtyping

    from uvit_decay.tasks.parallel.compilation import compile_net

    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    net, x, t = tiny_net(), torch.randn(3, 1, 8, 8), torch.tensor([0.1, 0.5, 0.9])
    output, states = net(x, t, layers=(1, 3))
    compile_net(net, "aot_eager", by_block)
    again, compiled = net(x, t, layers=(1, 3))
    for ours, theirs in zip((output, *states), (again, *compiled), strict=True):
        torch.testing.assert_close(ours, theirs)
    sum(state.sum() for state in compiled).backward()
    assert net.in_blocks[0].attn.qkv.weight.grad is not None


def test_a_resumed_run_is_the_run_that_was_not_stopped_and_its_checkpoint_is_read(tmp_path):
    make = partial(tiny_task, auxiliary=None)
    whole = fit(tmp_path / "whole", max_steps=6, task=tiny_task(auxiliary=[Aligned()]))
    fit(tmp_path / "half", StopAt(3), max_steps=6, task=tiny_task(auxiliary=[Aligned()]))
    kept = tmp_path / "half" / "checkpoints" / "last.ckpt"
    rest = fit(tmp_path / "rest", max_steps=6, task=tiny_task(auxiliary=[Aligned()]), ckpt_path=kept)
    assert rest[0] == whole[0][3:]
    assert same(rest[1], whole[1])
    assert load(kept).net.state_dict().keys() == make().net.state_dict().keys()
    with pytest.raises(UserError, match="projector"):
        fit(tmp_path / "without", max_steps=6, task=make(), ckpt_path=kept)


def rank_of_two(folder, rank):
    kinds = {"ddp": "ddp", "fsdp": Sharded()}
    return {
        name: train_logged(folder / name, sit(Norm(None, 0.1), Aligned(["dec_blocks.0"])), strategy=kind, devices=2)
        for name, kind in kinds.items()
    }


@pytest.mark.slow
def test_two_processes_train_as_one_does(programs, tmp_path):
    first, second = on_two_processes(programs, partial(rank_of_two, tmp_path), tmp_path)
    one = train_logged(tmp_path / "one", sit(Norm(None, 0.1), Aligned(["dec_blocks.0"])))
    for name in ("ddp", "fsdp"):
        for values, expected, other in zip(first[name], one, second[name], strict=True):
            for key in ("train/loss", "train/aux/norm", "train/aux/aligned"):
                assert values[key] == other[key]
                assert values[key] == pytest.approx(expected[key], rel=1e-4)


MINE = """
from uvit_decay.tasks import AuxiliaryLoss


class Repelled(AuxiliaryLoss):
    def __init__(self, table: str, layers: list[str | int] | None = None, weight: float = 1.0) -> None:
        super().__init__(layers, weight)
        self.tau = float(open(table).read())

    def forward(self, states, batch, times):
        (state,) = states.values()
        flat = state.flatten(1).float()
        return (-(flat[:, None] - flat[None]).square().mean(dim=2) / self.tau).exp().mean().log()
"""


def test_flags_add_losses_and_a_resumed_run_must_have_the_same(tmp_path, monkeypatch, capsys):
    (tmp_path / "disp.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    small = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.callbacks=uvit_decay.callbacks.LastCheckpoint"]
    small += ["--trainer.limit_val_batches=0", "--trust=disp", "--trainer.log_every_n_steps=1"]
    losses = ["--model.auxiliary+=Repelled", "--model.auxiliary.weight", "0.25"]
    losses += ["--model.auxiliary.layers", "[mid_block]", "--model.auxiliary.table", "tau.txt"]
    (tmp_path / "tau.txt").write_text("0.5")
    train(monkeypatch, tmp_path, "fit", *small, *losses, "--trainer.max_steps=2")
    run = tmp_path / "runs" / "digits" / "version_0"
    assert "train/aux/repelled" in (run / "metrics.csv").read_text().splitlines()[0]
    contents = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert contents["settings"]["model.auxiliary.Repelled.weight"] == 0.25
    resume = [*small, "--trainer.max_steps=3", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"]
    (tmp_path / "tau.txt").write_text("0.6")
    losses[2] = "0.5"
    line = refused(capsys, train, monkeypatch, tmp_path, "fit", *resume, *losses)
    find_line(line, "model.auxiliary.Repelled.weight", "model.auxiliary.Repelled.table.sha256", "--resume.allow")
    assert "--model.auxiliary.Repelled" not in line  # which cannot be typed
    find_line(refused(capsys, train, monkeypatch, tmp_path, "fit", *resume), "model.auxiliary")
    train(monkeypatch, tmp_path, "fit", *resume, *losses, "--resume.allow=model.auxiliary")
