"""Training in float16 with a scaled loss, on the CPU: skipped steps, norms and clipping, resumption."""

import pytest
import torch
from conftest import Losses, same, state, tiny_net, tiny_task, tiny_trainer
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from refusals import raises_user_error

from uvit_decay.callbacks import EMA, LastCheckpoint
from uvit_decay.data import Digits
from uvit_decay.tasks import DiffusionTask
from uvit_decay.tasks.optim.options import Optimization
from uvit_decay.tasks.parallel.sharding import Sharded


class Spoil(Callback):
    """Makes the gradient of some steps infinite, and remembers batches and the weights and averages after each step."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.batches, self.weights, self.averages = steps, [], [], []

    def on_train_batch_start(self, trainer, task, batch, batch_idx) -> None:
        self.batches.append(batch.number)

    def on_after_backward(self, trainer, task) -> None:
        if trainer.global_step in self.steps:
            next(task.net.parameters()).grad.view(-1)[0] = torch.inf

    def on_train_batch_end(self, trainer, task, *_) -> None:
        (ema,) = (callback for callback in trainer.callbacks if isinstance(callback, EMA))
        self.weights.append(state(task))
        self.averages.append({name: value.clone() for name, value in ema.shadow.items()})


def fit(folder, *spoilt, scaled=True, optim=None, ckpt_path=None, max_steps=8, **options):
    """A run in float16 with these spoilt steps, or in float32: its trainer, what `Spoil` saw, and its losses."""
    task = tiny_task() if optim is None else DiffusionTask(tiny_net(), optim=optim)
    spoil, losses = Spoil(*spoilt), Losses()
    if scaled:
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
    callbacks = (EMA(0.9), spoil, losses, LastCheckpoint(keep_every_n_steps=5))
    trainer = tiny_trainer(folder, *callbacks, max_steps=max_steps, log_every_n_steps=1, **options)
    trainer.fit(task, Digits(32), ckpt_path=ckpt_path)
    return trainer, spoil, losses.values


def test_a_step_whose_gradient_is_not_finite_counts_and_changes_nothing(tmp_path):
    trainer, seen, _ = fit(tmp_path, 0, 3, 4)
    assert seen.batches == list(range(8))
    assert trainer.global_step == 8
    moved = [not same(a, b) for a, b in zip(seen.weights, seen.weights[1:], strict=False)]
    averaged = [not same(a, b) for a, b in zip(seen.averages, seen.averages[1:], strict=False)]
    assert moved == averaged == [True, True, False, False, True, True, True]
    assert trainer.callback_metrics["train/skipped_steps"] == 3
    assert trainer.callback_metrics["train/lr"] == pytest.approx(8e-4)  # of the warm-up: skipped steps count
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**16 / 2**3


def test_a_run_in_float16_goes_on_as_if_it_had_not_been_stopped(tmp_path):
    whole, seen, losses = fit(tmp_path / "whole", 2, 4, 5)
    kept = tmp_path / "whole" / "checkpoints" / "step_00000005.ckpt"
    rest, seen_later, later = fit(tmp_path / "rest", 2, 4, 5, ckpt_path=kept)
    assert later == losses[5:]
    assert same(seen_later.weights[-1], seen.weights[-1])
    assert same(seen_later.averages[-1], seen.averages[-1])
    assert rest.lightning_module.skipped.total == 3
    assert rest.precision_plugin.state_dict() == whole.precision_plugin.state_dict()


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_run_may_change_to_float16(precision, tmp_path):
    fit(tmp_path / "a", scaled=False, max_steps=5, precision=precision)
    trainer, *_ = fit(tmp_path / "b", ckpt_path=tmp_path / "a" / "checkpoints" / "last.ckpt", max_steps=6)
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**16


def test_twenty_skipped_steps_in_a_row_end_the_run(tmp_path):
    with raises_user_error("20", "24", "`trainer.precision`", "32-true", "`lr`"):
        fit(tmp_path, 2, *range(5, 40), max_steps=40)
    kept = torch.load(tmp_path / "checkpoints" / "step_00000020.ckpt", weights_only=True)
    assert all(torch.isfinite(value).all() for value in kept["state_dict"].values())


@pytest.mark.parametrize("name", ["adamw", "muon", "lars", "sgd", "torch.optim.NAdam"])
def test_norm_and_clipping_are_of_the_unscaled_gradient(name, tmp_path):
    optim = Optimization(1e-3, warmup_steps=0, optimizer=name)
    clipped = {"gradient_clip_val": 0.05, "max_steps": 2}
    trainer, seen, losses = fit(tmp_path / "float16", optim=optim, **clipped)
    reference, expected, float32 = fit(tmp_path / "float32", scaled=False, optim=optim, **clipped)
    assert not any(group.get("fused") for group in trainer.optimizers[0].param_groups)
    norm = float(reference.callback_metrics["train/grad_norm"])
    assert float(trainer.callback_metrics["train/grad_norm"]) == pytest.approx(norm, rel=0.02)
    assert losses == pytest.approx(float32, rel=0.01)
    assert not same(seen.weights[0], seen.weights[1])
    for key, value in expected.weights[-1].items():
        torch.testing.assert_close(seen.weights[-1][key], value, rtol=0, atol=4e-3, msg=key)


@pytest.mark.parametrize(
    ("optim", "options", "words"),
    [
        ({"optimizer": "torch.optim.SGD", "arguments": {"fused": True}}, {}, ("`arguments`",)),
        ({}, {"strategy": Sharded(), "devices": 1}, ("`strategy`", "ddp", "16-mixed")),
    ],
)
def test_what_float16_cannot_train_is_refused(optim, options, words, tmp_path):
    with raises_user_error(*words):
        fit(tmp_path, optim=Optimization(1e-3, **optim), **options)
