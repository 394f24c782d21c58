"""Training: exact resumption, independence of callbacks and devices, guards."""

import csv
from functools import partial

import jaxtyping
import pytest
import torch
from conftest import Losses, same, tiny_net, tiny_task, tiny_trainer
from gloo import on_two_processes
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from refusals import find_line, raises_user_error
from runs import fit
from small_mae import mae_task
from small_vit import fine_tuning, linear_probe

from uvit_decay.callbacks import EMA, LastCheckpoint, LinearProbes, Preview
from uvit_decay.checkpoint import load
from uvit_decay.data import Digits
from uvit_decay.generation.samples import Samples
from uvit_decay.nn import SiT, UViT
from uvit_decay.tasks import DiffusionTask
from uvit_decay.terminal.errors import UserError


def build_unused():
    """Return a task whose network has a parameter that never gets a gradient."""
    net = tiny_net()
    net.unused = torch.nn.Parameter(torch.ones(3))
    return tiny_task(net)


def build_fixed():
    """Return a task whose network has fixed positions."""
    torch.manual_seed(0)
    return tiny_task(SiT(8, 2, 1, dim=16, depth=2, heads=2, num_classes=10))


VALIDATED = {"limit_val_batches": 1.0, "val_check_interval": 4, "check_val_every_n_epoch": None}
RUNS = {  # a task, the step from which it is resumed, and options of the run
    "in the first epoch": (lambda: tiny_task(schedule="cosine"), 6, {"max_steps": 14, "limit_train_batches": 11}),
    "in the third epoch": (tiny_task, 7, {"max_steps": 8, "limit_train_batches": 3}),
    "pre-training": (mae_task, 12, {"max_steps": 20, "limit_train_batches": 15}),
    "between validations": (linear_probe, 7, {"max_steps": 14, "limit_train_batches": 9, **VALIDATED}),
    "after an epoch": (fine_tuning, 9, {"max_steps": 14, "limit_train_batches": 9, **VALIDATED}),
    "fixed positions": (build_fixed, 2, {"max_steps": 4}),
    "unused parameter": (build_unused, 2, {"max_steps": 4}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path, name):
    make, step, options = RUNS[name]
    whole = fit(tmp_path / "whole", LastCheckpoint(keep_every_n_steps=step), task=make(), **options)
    kept = tmp_path / "whole" / "checkpoints" / f"step_{step:08d}.ckpt"
    rest = fit(tmp_path / "rest", task=make(), ckpt_path=kept, **options)
    assert rest[0] == whole[0][step:]
    assert same(rest[1], whole[1])
    assert same(rest[2], whole[2])


def test_a_run_that_ends_at_a_kept_checkpoint_has_a_last_one(tmp_path):
    """Also if the evaluation between the checkpoint that stays and the end fails."""

    class Failing(Preview):
        def evaluate(self, trainer, task):
            raise RuntimeError("in the evaluation")

    callbacks = (Failing(1, 4), LastCheckpoint(every_n_steps=0, keep_every_n_steps=4))
    with pytest.raises(RuntimeError, match="in the evaluation"):
        fit(tmp_path, *callbacks, max_steps=4)
    for name in ("last.ckpt", "step_00000004.ckpt"):
        assert load(tmp_path / "checkpoints" / name).card.step == 4


def test_a_checkpoint_goes_on_only_with_its_own_classes(tmp_path):
    class Renamed(Digits):
        def load(self) -> None:
            super().load()
            self.class_names = tuple("abcdefghij")

    fit(tmp_path / "a", max_steps=2)
    checkpoint = tmp_path / "a" / "checkpoints" / "last.ckpt"
    with raises_user_error("sha256", "renamed"):
        fit(tmp_path / "b", max_steps=3, data=Renamed(32), ckpt_path=checkpoint)


def test_compiled_training_is_eager_training_and_its_checkpoint_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    eager = fit(tmp_path / "eager", max_steps=4)
    evaluating = (Preview(rows=1), LinearProbes(times=(0.1,), max_train=50, max_test=50))
    compiled = fit(tmp_path / "compiled", *evaluating, max_steps=4, task=tiny_task(compile="eager"))
    assert compiled[0] == pytest.approx(eager[0], rel=1e-5)
    assert compiled[1].keys() == eager[1].keys()
    assert (tmp_path / "compiled" / "probes.png").exists()


@pytest.mark.parametrize("task", [tiny_task, mae_task])
def test_bf16_training_is_as_otherwise_and_logs_finite_figures_in_float32(tmp_path, task):
    expected, losses, half = fit(tmp_path / "a", max_steps=5, task=task())[0], Losses(), task()
    trainer = tiny_trainer(tmp_path / "b", losses, EMA(0.9), max_steps=5, precision="bf16-mixed")
    trainer.fit(half, Digits(32))
    assert losses.values == pytest.approx(expected, rel=0.02)
    logged = trainer.callback_metrics
    assert {"train/loss", "train/lr", "train/grad_norm", "train/images_per_second"} <= logged.keys()
    assert all(torch.isfinite(value) for value in logged.values())
    assert float(logged["train/images_per_second"]) > 0
    assert all(p.dtype == torch.float32 for p in half.parameters())


def test_a_task_loaded_from_a_checkpoint_samples_as_the_one_that_wrote_it(tmp_path):
    task, trainer = tiny_task(prediction="velocity"), tiny_trainer(tmp_path, max_steps=3)
    trainer.fit(task, Digits(32))
    loaded = DiffusionTask.load_from_checkpoint(tmp_path / "checkpoints" / "last.ckpt", seed=3)
    images = [Samples(each.source(), each.sampling, "raw", range(10)).images(range(4)) for each in (task, loaded)]
    assert torch.equal(*images)
    assert (loaded.seed, loaded.training) == (3, False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: tiny_task(UViT(16, 2, 1, dim=16, depth=2, heads=2, num_classes=7)),
            "`model.net.image_size` 8 `model.net.num_classes` 10",
        ),
        (lambda: tiny_task(tiny_net(null_label=False)), ("label_dropout", "null label")),
        (lambda: tiny_task(label_dropout=0.0), "guidance 2 needs label_dropout above 0"),
        (lambda: tiny_task(schedule="cosine"), "cosine"),
    ],
)
def test_what_does_not_fit_is_said_before_training(tmp_path, make, message):
    max_steps = -1 if "cosine" in message else 3
    with raises_user_error(message):
        tiny_trainer(tmp_path, max_steps=max_steps, max_epochs=-1).fit(make(), Digits(32))


@pytest.mark.parametrize(("every", "steps"), [(50, [3]), (2, [2]), (0, [])])
def test_a_run_shorter_than_the_interval_of_the_log_logs_its_last_step(every, steps, tmp_path):
    logger = CSVLogger(tmp_path)
    tiny_trainer(tmp_path, max_steps=3, logger=logger, log_every_n_steps=every).fit(tiny_task(), Digits(32))
    logged = []
    for path in tmp_path.rglob("metrics.csv"):
        with path.open() as file:
            logged += [int(row["step"]) + 1 for row in csv.DictReader(file) if row["train/loss"]]
    assert logged == steps


def test_labels_are_dropped_at_the_stated_rate_in_training_alone(tmp_path):
    seen = {True: [], False: []}

    task = tiny_task(label_dropout=0.25)
    task.net.label_emb.register_forward_pre_hook(lambda _, inputs: seen[task.training].append(inputs[0].clone()))
    options = {"limit_val_batches": 1, "val_check_interval": 4, "check_val_every_n_epoch": None}
    fit(tmp_path, max_steps=4, task=task, data=Digits(256), **options)
    labels = torch.cat(seen[True])
    assert float((labels == 10).double().mean()) == pytest.approx(0.25, abs=0.05)
    assert set(labels.tolist()) == set(range(11))
    assert len(seen[False]) == 1
    assert not (torch.cat(seen[False]) == 10).any()


def train_spoilt(folder, rank):
    """Return the errors of runs of two processes after the images of one of them are NaN at step 4 or 6."""
    return {last: run_to_error(folder / str(last), last, rank) for last in (4, 6)}


def run_to_error(folder, last, rank):
    """Return the error of one of these runs, its steps, and how DDP was set up."""
    found = {"error": "none", "steps": 0}

    def spoil(trainer, task, batch, batch_idx):
        model = trainer.strategy.model
        found["steps"] += 1
        found["ddp"] = [model.find_unused_parameters, model.gradient_as_bucket_view, model.will_sync_module_buffers()]
        if trainer.global_step == last and rank == 1:
            batch.images.fill_(float("nan"))

    callback = LambdaCallback(on_train_batch_start=spoil)
    try:
        tiny_trainer(folder, callback, max_steps=20, devices=2, strategy="ddp").fit(tiny_task(), Digits(32))
    except UserError as error:
        found["error"] = str(error)
    return found


@pytest.mark.slow
def test_a_bad_loss_of_one_process_ends_all_of_them_at_the_next_log_step(programs, tmp_path):
    for ends in on_two_processes(programs, partial(train_spoilt, tmp_path), tmp_path):
        for last, steps in ((4, 5), (6, 10)):
            found = ends[str(last)]
            find_line(found.pop("error"), "loss", f"step {last}")
            assert found == {"steps": steps, "ddp": [False, True, False]}


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    def spoil(trainer, task, *_):
        if trainer.global_step == 8:
            task.net.norm.weight.data.fill_(float("nan"))

    with raises_user_error("step 8", "learning rate 0.0009"):
        fit(tmp_path, LambdaCallback(on_train_batch_start=spoil), LastCheckpoint(every_n_steps=3), max_steps=20)
    kept = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert kept["global_step"] == 6
    assert all(torch.isfinite(value).all() for value in kept["state_dict"].values())


def test_images_that_are_not_finite_are_not_blamed_on_the_learning_rate(tmp_path):
    def spoil(trainer, task, batch, batch_idx):
        if trainer.global_step == 2:
            batch.images[-1, 0, 0, 0] = torch.inf

    with raises_user_error("step 2", "images") as raised:
        fit(tmp_path, LambdaCallback(on_train_batch_start=spoil), max_steps=4)
    assert "rate" not in str(raised.value)


@pytest.mark.parametrize("what", ["weights are", "loss is"])
def test_nothing_is_saved_after_a_bad_loss_or_with_bad_weights(tmp_path, what):
    task = tiny_task()
    trainer = tiny_trainer(tmp_path, max_steps=3, log_every_n_steps=0)
    trainer.fit(task, Digits(32))
    if what == "loss is":
        task._guard.bad_step = torch.tensor(3)
    else:
        task.net.norm.weight.data[0] = float("inf")
    with raises_user_error(what, "step 3"):
        trainer.save_checkpoint(tmp_path / "bad.ckpt")
    assert not (tmp_path / "bad.ckpt").exists()
