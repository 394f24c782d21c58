"""Pre-training of MAE: keyed masks, exact resumption, its checkpoint, and what it refuses."""

import pytest
import torch
from conftest import refused, same, train
from lightning.pytorch import Callback
from runs import StopAt, configuration, fit
from small_mae import mae_task, small_mae

from uvit_decay.checkpoint import load
from uvit_decay.data import Digits
from uvit_decay.evaluation.open_by_name import open_data
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.random import uniform


class Masks(Callback):
    """Remembers the noise of every forward pass."""

    def __init__(self) -> None:
        self.seen = []

    def on_fit_start(self, trainer, task) -> None:
        task.net.register_forward_pre_hook(lambda net, inputs: self.seen.append(inputs[1].clone()))


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path):
    options = {"max_steps": 20, "limit_train_batches": 15}
    whole = fit(tmp_path / "whole", task=mae_task(), **options)
    first = fit(tmp_path / "half", StopAt(12), task=mae_task(), **options)
    checkpoint = tmp_path / "half" / "checkpoints" / "last.ckpt"
    rest = fit(tmp_path / "rest", ckpt_path=checkpoint, task=mae_task(), **options)
    assert first[0] + rest[0] == whole[0]
    assert same(rest[1], whole[1])
    assert same(rest[2], whole[2])
    assert sum(whole[0][-5:]) < sum(whole[0][:5])


def test_a_mask_is_a_function_of_seed_step_and_place_in_any_pieces(tmp_path):
    runs = []
    for size in (None, 8):
        masks = Masks()
        runs.append((masks, fit(tmp_path / str(size), masks, max_steps=6, data=Digits(32, size), task=mae_task())))
    (whole, (_, weights, _)), (cut, (_, others, _)) = runs
    assert torch.equal(torch.cat(whole.seen), torch.cat(cut.seen))
    assert torch.equal(whole.seen[4], uniform("mask", "train", 0, rows=torch.arange(128, 160), shape=(16,)))
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=0, atol=2e-5)


def test_masks_of_validation_are_the_same_each_time(tmp_path):
    losses = []

    class Validation(Callback):
        def on_validation_end(self, trainer, task) -> None:
            losses.append(float(trainer.callback_metrics["val/loss"]))

    options = {"limit_val_batches": 1.0, "val_check_interval": 1, "check_val_every_n_epoch": None}
    task = mae_task()
    task.optim = type(task.optim)(lr=1e-30)
    fit(tmp_path, Validation(), max_steps=2, task=task, **options)
    assert losses[0] == losses[1] > 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mae")
    fit(folder, max_steps=2, task=mae_task())
    return folder / "checkpoints" / "last.ckpt"


def test_its_checkpoint_is_of_an_encoder(checkpoint):
    loaded = load(checkpoint)
    card = loaded.card
    assert (loaded.path, card.prediction, card.sampling, card.class_names) == (None, None, None, ())
    assert (card.data, card.step, card.weights, type(loaded.net).__name__) == ("digits", 2, "ema", "MAE")
    with pytest.raises(UserError, match=r"is of an encoder \(MAE\), which makes no images: evaluate.py probe"):
        loaded.source(torch.device("cpu"))


@pytest.mark.parametrize(
    ("ratio", "message"),
    [(0.0, r"mask_ratio must lie in \(0, 1\)"), (1.0, "lie in"), (0.99, "leaves 0 visible"), (-0.5, "lie in")],
)
def test_a_mask_of_nothing_or_of_everything_is_refused(ratio, message):
    with pytest.raises(UserError, match=message):
        mae_task(mask_ratio=ratio)


def test_another_function_is_refused_and_another_ratio_said(checkpoint, tmp_path):
    with pytest.raises(UserError, match=r"net.norm_pix True, this run has False: set --model.net.norm_pix True"):
        fit(tmp_path, max_steps=3, task=mae_task(small_mae(norm_pix=False)), ckpt_path=checkpoint)


def test_a_configuration_trains_and_resumes_from_the_command_line(tmp_path, monkeypatch, caplog, capsys):
    optim = {"blr": 1.5e-4, "betas": [0.9, 0.95], "warmup_epochs": 0.5, "schedule": "cosine"}
    fitting = ["fit", f"--config={configuration(tmp_path, 'mae', mae_task(), optim=optim)}"]
    with caplog.at_level("INFO"):
        flags = ["--trainer.max_epochs=1", "--model.mask_ratio=0.5", "--data.device_batch_size=16"]
        train(monkeypatch, tmp_path, *fitting, *flags)
    path = "runs/mae/version_0/checkpoints/last.ckpt"
    config = "runs/mae/version_0/config.yaml"
    assert f"judge its features: python evaluate.py probe --ckpt {path} --data {config}" in caplog.text
    assert open_data(str(tmp_path / config), None, 8, 1, clean=True).name == "digits"
    caplog.clear()
    with caplog.at_level("INFO"):
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
    assert "was trained with net uvit_decay.nn.mae.MAE, this run has uvit_decay.nn.uvit.UViT" in line
