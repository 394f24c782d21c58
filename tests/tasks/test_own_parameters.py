"""Parameters of a task besides its network: trained, resumed, clipped, named in checkpoints, not in samples."""

from functools import partial

import pytest
import torch
from conftest import same, tiny_net, tiny_task, tiny_trainer
from gloo import on_two_processes
from lightning.pytorch.loggers import CSVLogger
from refusals import find_line, raises_user_error
from runs import StopAt, fit
from torch import nn

from uvit_decay.callbacks import EMA
from uvit_decay.checkpoint import load
from uvit_decay.data import Digits
from uvit_decay.runtime.distributed import others_needed
from uvit_decay.tasks import DiffusionTask
from uvit_decay.tasks.optim.options import Optimization
from uvit_decay.tasks.own_parameters import own_parameters
from uvit_decay.tasks.parallel.sharding import Sharded
from uvit_decay.tasks.utilisation import image_flops
from uvit_decay.terminal.errors import UserError


class Projected(DiffusionTask):
    """A denoiser whose middle state a projector maps to a frozen view of the image."""

    def __init__(self, net, **options) -> None:
        super().__init__(net, **options)
        torch.manual_seed(1)
        self.projector = nn.Sequential(nn.Linear(net.dim, 8), nn.LayerNorm(8), nn.Linear(8, 4))
        self.teacher = nn.Sequential(nn.Conv2d(net.channels, 4, 2, 2), nn.BatchNorm2d(4, affine=False))
        self.teacher.requires_grad_(False)

    def loss(self, batch, stage):
        times = torch.zeros(len(batch.images), device=batch.images.device)
        _, (state,) = self.net(batch.images, times, layers=(2,))
        features = self.projector(state[:, self.net.num_prefix_tokens :])
        wanted = self.teacher(batch.images).flatten(2).mT
        return super().loss(batch, stage) + (features - wanted).square().mean()


def build_task(decay_on="matrices", **options):
    optim = Optimization(1e-2, (0.9, 0.99), 0.03, warmup_steps=1, decay_on=decay_on)
    return Projected(tiny_net(), optim=optim, **options)


def test_all_that_is_trained_moves_and_biases_have_no_weight_decay(tmp_path):
    task = build_task()
    before = {name: value.detach().clone() for name, value in task.named_parameters()}
    trainer = tiny_trainer(tmp_path, max_steps=2)
    trainer.fit(task, Digits(32))
    moved = {name for name, value in task.named_parameters() if not torch.equal(value, before[name])}
    assert {name for name in before if name.startswith("projector.")} <= moved
    assert not {name for name in moved if name.startswith("teacher.")}
    decay = {id(p): group["weight_decay"] for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert [decay[id(p)] for _, p in own_parameters(task)] == [0.03, 0, 0, 0, 0.03, 0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lars", "sgd"])
def test_every_optimizer_takes_them_after_the_network(optimizer):
    task, optim = build_task(), Optimization(optimizer=optimizer, decay_on="matrices")
    alone = optim.groups(task.net, 1.0)
    both = optim.groups(task.net, 1.0, own_parameters(task))
    assert [len(group["params"]) for group in both] == [len(group["params"]) for group in alone] + [2, 4]
    assert all(both[-1].keys() == group.keys() for group in both)
    optim.build(task.net, 1.0, own_parameters(task))


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path):
    whole = fit(tmp_path / "whole", max_steps=6, task=build_task())
    fit(tmp_path / "half", StopAt(3), max_steps=6, task=build_task())
    kept = tmp_path / "half" / "checkpoints" / "last.ckpt"
    rest = fit(tmp_path / "rest", max_steps=6, task=build_task(), ckpt_path=kept)
    assert rest[0] == whole[0][3:]
    assert same(rest[1], whole[1])
    ends = [
        torch.load(tmp_path / run / "checkpoints" / "last.ckpt", weights_only=True)["optimizer_states"][0]["state"]
        for run in ("whole", "rest")
    ]
    assert all(same(ends[0][i], ends[1][i]) for i in ends[0])
    assert len(ends[0]) == len(list(tiny_net().parameters())) + 6


def test_the_checkpoint_names_them_and_its_readers_take_the_network_alone(tmp_path):
    task = build_task()
    trainer = tiny_trainer(tmp_path, EMA(0.9), max_steps=2)
    trainer.fit(task, Digits(32))
    path = tmp_path / "checkpoints" / "last.ckpt"
    contents = torch.load(path, weights_only=True)
    own = {name for name in contents["state_dict"] if not name.startswith("net.")}
    assert own == {f"task.projector.{name}" for name in task.projector.state_dict()}
    assert not any("projector" in name for name in contents["callbacks"]["EMA"]["shadow"])
    for weights in ("raw", "ema"):
        assert load(path, weights).net.state_dict().keys() == task.net.state_dict().keys()
    loaded = Projected.load_from_checkpoint(path)
    assert torch.isfinite(loaded.source().net(torch.zeros(1, 1, 8, 8), torch.ones(1), torch.zeros(1).long())).all()


def test_a_checkpoint_with_other_own_parameters_is_refused(tmp_path):
    fit(tmp_path / "a", max_steps=1, task=build_task())
    path = tmp_path / "a" / "checkpoints" / "last.ckpt"
    with raises_user_error("task.projector"):
        fit(tmp_path / "b", max_steps=2, ckpt_path=path)


def test_they_are_clipped_with_the_network(tmp_path):
    norms = []

    class Watched(Projected):
        def on_before_zero_grad(self, optimizer):
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            if grads:
                norms.append(torch.cat([grad.flatten() for grad in grads]).norm())

    torch.manual_seed(0)
    task = Watched(tiny_net(), optim=Optimization(1e-3))
    tiny_trainer(tmp_path, max_steps=3, gradient_clip_val=0.01).fit(task, Digits(32))
    assert torch.stack(norms).tolist() == pytest.approx([0.01] * len(norms), rel=1e-3)


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    task = build_task()
    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer.fit(task, Digits(32))
    with torch.no_grad():
        task.projector[0].weight[0, 0] = torch.nan
    with pytest.raises(UserError, match="weights are not finite"):
        trainer.save_checkpoint(tmp_path / "bad.ckpt")


def test_flops_of_a_task_with_modules_of_its_own_are_counted(tmp_path):
    found = []

    class Counted(Projected):
        def on_train_start(self):
            found.append(image_flops(self))
            assert all(p.device.type == "cpu" for p in self.parameters())

    tiny_trainer(tmp_path, max_steps=1, logger=CSVLogger(tmp_path)).fit(Counted(tiny_net()), Digits(32))
    plain = []
    task = tiny_task()
    task.on_train_start = lambda: plain.append(image_flops(task))
    tiny_trainer(tmp_path, max_steps=1).fit(task, Digits(32))
    assert found[0] > plain[0]


def train_and_save(folder, rank=0, strategy="auto", micro=None, **options):
    task = build_task()
    trainer = tiny_trainer(folder, max_steps=3, gradient_clip_val=0.5, strategy=strategy, **options)
    trainer.fit(task, Digits(32, device_batch_size=micro))
    values = trainer.strategy.lightning_module_state_dict()
    own = {name: value for name, value in values.items() if name.startswith("task.")}
    folder.mkdir(exist_ok=True)
    torch.save(own, folder / f"{rank}.own")


def rank_of_two(folder, rank):
    for name, strategy in (("ddp", "ddp"), ("fsdp", Sharded())):
        torch.manual_seed(rank)
        train_and_save(folder / name, rank, strategy, devices=2)
        train_and_save(folder / f"{name} pieces", rank, "ddp" if name == "ddp" else Sharded(), micro=8, devices=2)


def test_pieces_train_as_the_whole_batch_does(tmp_path):
    train_and_save(tmp_path / "whole")
    train_and_save(tmp_path / "pieces", micro=8)
    whole, pieces = (torch.load(tmp_path / name / "0.own") for name in ("whole", "pieces"))
    for name, value in whole.items():
        torch.testing.assert_close(pieces[name], value, rtol=0, atol=2e-3, msg=name)


@pytest.mark.slow
def test_two_processes_train_them_as_one_does(programs, tmp_path):
    on_two_processes(programs, partial(rank_of_two, tmp_path), tmp_path)
    train_and_save(tmp_path / "one")
    one = torch.load(tmp_path / "one" / "0.own")
    for name in ("ddp", "fsdp", "ddp pieces", "fsdp pieces"):
        first, second = (torch.load(tmp_path / name / f"{rank}.own") for rank in range(2))
        assert same(first, second)
        for key, value in one.items():
            torch.testing.assert_close(first[key], value, rtol=0, atol=2e-3, msg=f"{name} {key}")


class UsedAtTimes(Projected):
    """A task with parameters that it uses in the first micro-batch of a step only, or on rank 0 only, or never."""

    def __init__(self, net, name, **options) -> None:
        super().__init__(net, **options)
        torch.manual_seed(1)
        self.add_module(name, nn.Linear(1, 1, bias=False))
        self.name, self.calls = name, 0

    def loss(self, batch, stage):
        self.calls += 1
        loss = super().loss(batch, stage)
        if (self.name == "early" and self.calls == 1) or (self.name == "first" and self.global_rank == 0):
            loss = loss + self.get_submodule(self.name).weight.sum()
        return loss


def read_messages_on_rank(folder, rank):
    """Return the errors of runs with a parameter without a gradient, by its name and the strategy."""
    messages = {}
    for name, strategy in (("unused", "ddp"), ("unused", Sharded()), ("early", "ddp"), ("first", "ddp")):
        trainer = tiny_trainer(folder, max_steps=3, strategy=strategy, devices=2)
        with pytest.raises(UserError) as caught, others_needed():
            trainer.fit(UsedAtTimes(tiny_net(), name), Digits(32, device_batch_size=8))
        messages[f"{name} {type(strategy).__name__}"] = str(caught.value)
        assert trainer.global_step == 0
    return messages  # rank 1 ends in the last run, for which rank 0 waits


@pytest.mark.slow
def test_a_parameter_without_a_gradient_is_named_in_the_first_step(programs, tmp_path):
    first, second = on_two_processes(programs, partial(read_messages_on_rank, tmp_path), tmp_path)
    find_line(first.pop("first str"), "another process has ended")
    find_line(second.pop("first str"), "task.first.weight", "requires_grad_(False)")
    assert first == second
    for place, message in first.items():
        find_line(message, f"task.{place.split()[0]}.weight", "requires_grad_(False)")
