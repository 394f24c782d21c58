"""Evaluations while training: they change no training, and sample in the precision that was asked for."""

import pytest
import torch
from conftest import same, tiny_task, tiny_trainer
from lightning.pytorch.callbacks import LambdaCallback
from refusals import raises_user_error
from runs import StopAt, fit
from torch.utils.data import DataLoader

from uvit_decay.callbacks import GenerationMetrics, LinearProbes, Preview
from uvit_decay.data import Digits
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.encoders import SmallClassifier
from uvit_decay.pictures import to_float


def test_tf32_may_be_named_before_the_network_is_on_its_gpu(tmp_path, monkeypatch):
    def on_a_gpu(trainer, task, stage):  # in `setup` the network is on the CPU whatever the strategy's device
        with monkeypatch.context() as patch:
            patch.setattr(trainer.strategy, "_root_device", torch.device("cuda", 0))
            Preview(sampling=Sampling(precision="tf32")).setup(trainer, task, stage)

    tiny_trainer(tmp_path, LambdaCallback(setup=on_a_gpu), max_steps=1).fit(tiny_task(), Digits(32))
    for callback in (Preview(sampling=Sampling(precision="tf32")), LinearProbes(times=(0.1,), precision="tf32")):
        with raises_user_error("tf32", "CUDA", "cpu"):
            tiny_trainer(tmp_path, callback, max_steps=1).fit(tiny_task(), Digits(32))


def test_evaluations_have_the_precision_of_the_task_unless_they_name_one(tmp_path):
    callbacks = {
        Preview(sampling=Sampling("ddim")): "bf16",
        Preview(sampling=Sampling("ddim", precision="float32")): "float32",
        Preview(): "bf16",
        LinearProbes(times=(0.1,)): "bf16",
        LinearProbes(times=(0.1,), precision="float32"): "float32",
    }

    def compare(trainer, task, stage):
        task.sampling = Sampling(precision="bf16")
        assert [callback.precision(task) for callback in callbacks] == list(callbacks.values())

    tiny_trainer(tmp_path, LambdaCallback(setup=compare), max_steps=1).fit(tiny_task(), Digits(32))


def test_evaluations_change_no_loss_and_no_weight(tmp_path):
    evaluations = (
        Preview(every_n_steps=5, rows=1),
        GenerationMetrics(SmallClassifier(), num=20, allow_few=True, every_n_steps=5),
        LinearProbes(times=(0.1,), every_n_steps=5, max_train=100, max_test=50),
    )
    evaluated = fit(tmp_path / "evaluated", *evaluations, max_steps=12, limit_val_batches=2, val_check_interval=4)
    alone = fit(tmp_path / "alone", max_steps=12)
    assert evaluated[0] == alone[0]
    assert same(evaluated[1], alone[1])
    saved = torch.load(tmp_path / "evaluated" / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(name.startswith("net.") for name in saved["state_dict"])
    assert not {name for name in saved["callbacks"] if "Metrics" in name or "Probes" in name}
    pictures = ("samples.png", "samples/step_00000005.png", "probes.png")
    for name in (*pictures, "generation.jsonl", "probes.jsonl", "probes.csv"):
        assert (tmp_path / "evaluated" / name).stat().st_size > 0


class Noted(Preview):
    """A preview that notes the steps at which it is due, and how many it promises; it draws nothing."""

    def __init__(self, **when) -> None:
        super().__init__(**when)
        self.steps = []

    def on_train_start(self, trainer, task) -> None:
        epoch, total = task.run_length()
        self.promised = self.count_due(epoch, trainer.global_step, int(total))
        super().on_train_start(trainer, task)

    def evaluate(self, trainer, task) -> None:
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize(
    ("when", "data", "options", "steps"),
    [
        ({"every_n_steps": 12}, {}, {"limit_train_batches": 12}, [12, 24]),
        ({"every_n_steps": 4, "every_n_epochs": 1}, {}, {"limit_train_batches": 6}, [4, 6, 8, 12, 16, 18, 20, 24]),
        ({"every_n_epochs": 2}, {"device_batch_size": 8}, {"limit_train_batches": 5}, [10, 20, 24]),
        ({"every_n_epochs": 1}, {"device_batch_size": 16}, {"limit_train_batches": 0.25}, [11, 22, 24]),
        ({"every_n_epochs": 1, "at_end": False}, {}, {}, []),
    ],
)
def test_evaluations_are_due_when_they_were_counted(when, data, options, steps, tmp_path):
    """Through epochs, micro-batches and limits; a run resumed at step 13 does the rest."""
    noted = Noted(**when)
    fit(tmp_path / "whole", noted, max_steps=24, data=Digits(32, **data), **options)
    assert noted.steps == steps
    assert noted.promised == len(steps)
    first, rest = Noted(**when), Noted(**when)
    fit(tmp_path / "half", first, StopAt(13), max_steps=24, data=Digits(32, **data), **options)
    path = tmp_path / "half" / "checkpoints" / "last.ckpt"
    fit(tmp_path / "rest", rest, max_steps=24, data=Digits(32, **data), ckpt_path=path, **options)
    assert rest.steps == [step for step in steps if step > 13]
    assert rest.promised == len(rest.steps)


def test_epochs_of_a_loader_have_the_steps_of_its_last_batches(tmp_path):
    noted = Noted(at_end=False, every_n_epochs=1)
    data = Digits(32)
    data.load()
    images, labels = data.train[list(range(100))]
    loader = DataLoader(list(zip(to_float(images), labels, strict=True)), batch_size=10)
    tiny_trainer(tmp_path, noted, max_steps=8, accumulate_grad_batches=3).fit(tiny_task(), loader)
    assert noted.steps == [4, 8]
    assert noted.promised == 2
