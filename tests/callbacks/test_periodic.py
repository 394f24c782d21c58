"""Evaluations while training: they change no training, and sample in the precision that was asked for."""

import pytest
import torch
from conftest import same, tiny_task, tiny_trainer
from lightning.pytorch.callbacks import LambdaCallback
from refusals import raises_user_error
from runs import fit
from torch.utils.data import DataLoader

from uvit_decay.callbacks import GenerationMetrics, LinearProbes, Preview
from uvit_decay.data import Digits
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.images.io import to_float
from uvit_decay.metrics import SmallClassifier


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


def test_epochs_of_a_loader_have_the_steps_of_its_last_batches(tmp_path):
    steps = []
    preview = Preview(at_end=False, rows=1)
    preview.every_n_epochs, preview.evaluate = 1, lambda trainer, task: steps.append(trainer.global_step)
    data = Digits(32)
    data.load()
    images, labels = data.train[list(range(100))]
    loader = DataLoader(list(zip(to_float(images), labels, strict=True)), batch_size=10)
    tiny_trainer(tmp_path, preview, max_steps=8, accumulate_grad_batches=3).fit(tiny_task(), loader)
    assert steps == [4, 8]


def test_two_callbacks_of_one_history_are_warned_of_once(tmp_path, caplog):
    previews = [Preview(at_end=False) for _ in range(2)]
    probes = [LinearProbes(times=(0.1,), at_end=False) for _ in range(3)]
    metrics = [GenerationMetrics(SmallClassifier(), num=20, allow_few=True) for _ in range(2)]

    def stop(trainer, task):
        raise RuntimeError("before training")

    callbacks = (*previews, *probes, *metrics, LambdaCallback(on_fit_start=stop))
    trainer = tiny_trainer(tmp_path, *callbacks, max_steps=1)
    with pytest.raises(RuntimeError, match="before training"):
        trainer.fit(tiny_task(), Digits(32))
    warnings = [text for text in caplog.messages if "replaces" in text]
    assert [warning.split()[-1] for warning in warnings] == ["probes.jsonl", "generation.jsonl"]
