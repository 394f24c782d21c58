"""Short training runs and their results."""

import torch
import yaml
from conftest import Losses, state, tiny_task, tiny_trainer
from lightning.pytorch import Callback

from uvit_decay.callbacks import EMA
from uvit_decay.data import Digits
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.nn import UViT
from uvit_decay.tasks import DiffusionTask


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *_) -> None:
        trainer.should_stop = trainer.global_step >= self.step


def fit(folder, *callbacks, max_steps, ckpt_path=None, task=None, data=None, **options):
    """Train, and return losses, final weights and EMA."""
    task, losses, ema = task or tiny_task(), Losses(), EMA(0.9)
    trainer = tiny_trainer(folder, losses, ema, *callbacks, max_steps=max_steps, **options)
    trainer.fit(task, data or Digits(32), ckpt_path=ckpt_path)
    return losses.values, state(task), {name: value.clone() for name, value in ema.shadow.items()}


def configuration(folder, experiment, task, **model):
    """Write a configuration of train.py that trains the task's network on digits; `model` are options of the task."""
    net = {"class_path": type(task.net).__name__, "init_args": task.net.config}
    callbacks = [{"class_path": name} for name in ("LastCheckpoint", "Summary")]
    logger = {"class_path": "RunLogger", "init_args": {"experiment": experiment}}
    trainer = {"accelerator": "cpu", "limit_train_batches": 4, "enable_progress_bar": False}
    content = {
        "seed_everything": 0,
        "trainer": {**trainer, "callbacks": callbacks, "logger": logger},
        "model": {"class_path": type(task).__name__, "init_args": {"net": net, **model}},
        "data": {"class_path": "Digits", "init_args": {"batch_size": 32}},
    }
    path = folder / f"{experiment}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def latent_task(**options):
    """Return a task that trains a small network on the latents of `encoded`."""
    torch.manual_seed(0)
    net = UViT(4, 2, 4, dim=16, depth=2, heads=2, num_classes=2, alpha_min=0.7, init="xavier")
    return DiffusionTask(net, sampling=Sampling("dpm++", 3), **options)
