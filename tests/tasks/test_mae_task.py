"""Pre-training of MAE: keyed masks, its checkpoint, and what it refuses."""

import jaxtyping
import pytest
import torch
from conftest import same, train
from lightning.pytorch.callbacks import LambdaCallback
from refusals import find_line, raises_user_error, refused
from runs import configuration, fit
from small_mae import mae_task

from uvit_decay.checkpoint import load
from uvit_decay.data import Digits
from uvit_decay.data.named import open_data
from uvit_decay.nn import MAE
from uvit_decay.runtime.random import uniform
from uvit_decay.tasks import MAETask


def test_a_mask_is_a_function_of_seed_step_and_place_in_any_pieces(tmp_path):
    def run(size):
        """Return the noise of every forward pass, and the weights at the end."""
        seen, task = [], mae_task()
        task.net.register_forward_pre_hook(lambda net, inputs: seen.append(inputs[1].clone()))
        return seen, fit(tmp_path / str(size), max_steps=6, data=Digits(32, size), task=task)[1]

    (whole, weights), (cut, others) = run(None), run(8)
    assert torch.equal(torch.cat(whole), torch.cat(cut))
    assert torch.equal(whole[4], uniform("mask", "train", 0, rows=torch.arange(128, 160), shape=(16,)))
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=0, atol=2e-5)


def test_masks_of_validation_are_the_same_each_time(tmp_path):
    def note(trainer, task):
        losses.append(float(trainer.callback_metrics["val/loss"]))

    losses, options = [], {"limit_val_batches": 1.0, "val_check_interval": 1, "check_val_every_n_epoch": None}
    task = mae_task()
    task.optim = type(task.optim)(lr=1e-30)
    fit(tmp_path, LambdaCallback(on_validation_end=note), max_steps=2, task=task, **options)
    assert losses[0] == losses[1] > 0


def test_its_checkpoint_is_of_an_encoder(tmp_path):
    fit(tmp_path, max_steps=2, task=mae_task())
    loaded = load(tmp_path / "checkpoints" / "last.ckpt")
    card = loaded.card
    assert (loaded.path, card.prediction, card.sampling, card.class_names) == (None, None, None, ())
    assert (card.data, card.step, card.weights, type(loaded.net).__name__) == ("digits", 2, "ema", "MAE")
    with raises_user_error("MAE", "evaluate.py probe"):
        loaded.source(torch.device("cpu"))
    task = MAETask.load_from_checkpoint(tmp_path / "checkpoints" / "last.ckpt", mask_ratio=0.5)
    assert (task.mask_ratio, task.training) == (0.5, False)
    assert same(task.net.state_dict(), loaded.net.state_dict())


@pytest.mark.parametrize(("ratio", "message"), [(0.0, ("mask_ratio", 0)), (0.99, ("mask_ratio", "0 of 16"))])
def test_a_mask_of_nothing_or_of_everything_is_refused(ratio, message):
    with raises_user_error(message):
        mae_task(mask_ratio=ratio)


def test_a_configuration_trains_and_resumes_from_the_command_line(tmp_path, monkeypatch, caplog, capsys):
    optim = {"blr": 1.5e-4, "betas": [0.9, 0.95], "warmup_epochs": 0.5, "schedule": "cosine"}
    fitting = ["fit", f"--config={configuration(tmp_path, 'mae', mae_task(), optim=optim)}"]
    flags = ["--trainer.max_epochs=1", "--model.mask_ratio=0.5", "--data.device_batch_size=16"]
    train(monkeypatch, tmp_path, *fitting, *flags)
    path = "runs/mae/version_0/checkpoints/last.ckpt"
    config = "runs/mae/version_0/config.yaml"
    find_line(caplog.text, f"evaluate.py probe --ckpt {path} --data {config}")
    assert open_data(str(tmp_path / config), None, 8, 1, clean=True).name == "digits"
    caplog.clear()
    more = ["--trainer.max_epochs=2", "--resume.allow=model.mask_ratio"]
    train(monkeypatch, tmp_path, *fitting, f"--ckpt_path={path}", *more)
    (line,) = [text for text in caplog.messages if "other settings" in text]
    assert set(line.partition(": ")[2].split(", ")) == {
        "trainer.max_epochs 2 (was 1)",
        "model.mask_ratio 0.75 (was 0.5)",
        "data.device_batch_size nothing (was 16)",
    }
    assert load(tmp_path / "runs/mae/version_1/checkpoints/last.ckpt").card.step == 8  # two epochs of this run
    line = refused(capsys, train, monkeypatch, tmp_path, "fit", f"--ckpt_path={path}")  # the default, a denoiser
    find_line(line, "uvit_decay.tasks.MAETask", "uvit_decay.tasks.DiffusionTask")


class OneValue(MAE):
    """A masked autoencoder that predicts one value of each patch, or masks each value."""

    of_mask = False

    def forward(self, x, noise, mask_ratio=0.75, layers=()):
        prediction, mask = super().forward(x, noise, mask_ratio)
        return (prediction, mask[:, :1]) if self.of_mask else (prediction[..., :1], mask)


@pytest.mark.parametrize(("of_mask", "fragments"), [(False, ("prediction", (32, 16, 1))), (True, ("mask", (32, 1)))])
def test_an_output_of_another_shape_does_not_train(tmp_path, of_mask, fragments, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    task = mae_task()
    task.net.__class__ = OneValue
    task.net.of_mask = of_mask
    with raises_user_error(*fragments):
        fit(tmp_path, max_steps=1, task=task)
