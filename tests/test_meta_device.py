"""Programs on a GPU, for which the meta device stands: where they wait for it, exactly (docs/performance.md)."""

import sys
from collections import Counter

import pytest
import torch
from conftest import tiny_net, tiny_task, tiny_trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import SingleDeviceStrategy
from record_ops import Waits
from small_mae import mae_task
from small_vit import fine_tuning, linear_probe
from torch.optim import Optimizer

from uvit_decay.callbacks import EMA, LastCheckpoint, Progress
from uvit_decay.data import Digits
from uvit_decay.diffusion.noise_path import VP, DDPMLinear
from uvit_decay.diffusion.samplers import SAMPLERS
from uvit_decay.diffusion.sampling import DiffusionModel, Sampling
from uvit_decay.generation.samples import Samples
from uvit_decay.nn import SiT
from uvit_decay.tasks import DiffusionTask, finite

META = torch.device("meta")
LOGGED = {
    "tasks/finite.py _find_first: reads a number": 1,
    "tasks/base.py on_train_batch_end: reads a number": 1,  # the loss, for the progress bar
}
TASKS = {
    "uvit": lambda: tiny_task(),
    "uvit clipped, learned alphas, recomputed": lambda: tiny_task(tiny_net(schedule="learnable", checkpointing=True)),
    "sit": lambda: DiffusionTask(SiT(8, 2, 1, dim=16, depth=2, heads=2, num_classes=10, alpha_min=0.7)),
    "mae": mae_task,
    "fine-tuning": fine_tuning,
    "probe": linear_probe,
}


class MetaAccelerator(CPUAccelerator):
    """An accelerator with the methods that Lightning calls."""

    def setup_device(self, device: torch.device) -> None: ...

    @staticmethod
    def get_parallel_devices(devices: object) -> list[torch.device]:
        return [META]


def waits_of_steps(folder, task, ema=True, save_at=10_000, **options):
    """Return what each of the first three steps of a run on the device waits for; the second one is logged."""
    waits, found = Waits(), []

    def count(*_):
        """Record the waits from the start of a step to the start of the next step."""
        found.append(dict(Counter(waits.found)))
        waits.found.clear()

    callbacks = [*([EMA(0.9)] if ema else []), LastCheckpoint(every_n_steps=save_at), Progress(line_every=0)]
    options |= {"strategy": SingleDeviceStrategy(META, accelerator=MetaAccelerator()), "accelerator": "auto"}
    options |= {"log_every_n_steps": 2, "enable_progress_bar": True}
    trainer = tiny_trainer(folder, *callbacks, LambdaCallback(on_train_batch_start=count), max_steps=4, **options)
    with pytest.MonkeyPatch.context() as patch, waits:
        patch.setattr(finite, "NEVER", 1)  # as every number of this device is
        for kind in ("fused", "foreach"):  # torch has both for meta tensors, but does not offer them
            patch.setattr(sys.modules[Optimizer.__module__], f"_get_{kind}_kernels_supported_devices", lambda: ["meta"])
        trainer.fit(task, Digits(32))
    return found[1:]


@pytest.mark.parametrize("name", TASKS)
def test_a_training_step_waits_for_the_device_where_it_is_logged(name, tmp_path):
    options = {"gradient_clip_val": 1.0} if "clipped" in name else {}
    first, *steps = waits_of_steps(tmp_path, TASKS[name](), ema="probe" not in name, **options)
    assert first == {}
    assert steps == [LOGGED, {}]


def test_a_checkpoint_waits_for_three_checks(tmp_path):
    guard = "tasks/finite.py _find_first: reads a number"
    saved = waits_of_steps(tmp_path, tiny_task(), save_at=3)[2]
    assert saved == {guard: 1, "tasks/finite.py check_finite: reads a number": 2}


def away(**changes) -> Samples:
    """Return samples of a small network on the device."""
    model = DiffusionModel.from_net(tiny_net().to(META).eval(), VP(), "eps", META)
    return Samples(model, Sampling(**changes), "raw", classes=range(10))


def away_dit(**changes) -> Samples:
    """Return samples of a small DiT on the device."""
    net = SiT(8, 2, 1, dim=16, depth=2, heads=2, num_classes=10, learn_sigma=True, time="dit", learned_variance=True)
    model = DiffusionModel.from_net(net.to(META).eval(), DDPMLinear(), "eps", META)
    model.path.alpha(torch.ones(1, device=META))  # copies the table of its levels, once for a program
    return Samples(model, Sampling(**changes), "raw", classes=range(10))


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "dopri5"])
def test_sampling_waits_for_the_device_once_at_the_end_of_a_batch(name):
    of = away_dit if SAMPLERS[name].learned_variance else away
    samples = of(sampler=name, steps=3, guidance=2.0, guidance_interval=(0.1, 0.6), guidance_channels=1)
    with Waits() as waits:
        images = samples.images(range(2))
    assert (images.device, images.shape, images.dtype) == (META, (2, 1, 8, 8), torch.uint8)
    assert waits.found == ["pictures.py to_uint8: reads a number"]
