"""Training steps with an addition beside the same step without it: skip scales and auxiliary losses.

The ratio of these cases is a cost: the time with the addition over the time without it. Both sides are this project's
code, and they train different functions, so that nothing is compared before the measurement.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Agreement, Case, Compared, Setting
from benchmarks.training import OPTIM, OurStep, default_precision, images
from uvit_decay.checkpoint.io import KEY, ModelCard
from uvit_decay.diffusion.noise_path import VP
from uvit_decay.files.instantiate import Spec
from uvit_decay.files.tensor_files import save_tensors
from uvit_decay.nn import MAE, UViT
from uvit_decay.tasks import REPA, AuxiliaryLoss, DiffusionTask, DispersiveLoss, LayerSync

NOT_COMPARED = Agreement(0.0, 0.0)


@dataclass(frozen=True)
class Addition:
    """An addition to a training step.

    Args:
        name: name of the case; a goal for the ratio is part of it.
        batch: images in a step.
        network: arguments of the network with the addition.
        losses: builds the auxiliary losses, given a folder for files.
        without: arguments of the network without the addition.
    """

    name: str
    batch: int
    network: dict[str, Any]
    losses: Callable[[Path], Sequence[AuxiliaryLoss]] = lambda folder: ()
    without: dict[str, Any] | None = None


def additions(setting: Setting) -> list[Addition]:
    """Return the additions that are measured."""
    batch = setting.size(cpu=16, gpu=256, quick=2)
    pairs = setting.size(cpu=64, gpu=64, quick=4)  # images that the dispersive loss compares
    decayed = {"schedule": "linear", "alpha_min": 0.7}
    return [
        Addition("skip_scale 0.9 (goal 1.02)", batch, {**decayed, "skip_scale": 0.9}, without=decayed),
        Addition("skip_scale kappa:0.7 (goal 1.02)", batch, {**decayed, "skip_scale": "kappa:0.7"}, without=decayed),
        Addition("skip_scale learned (goal 1.02)", batch, {**decayed, "skip_scale": "learned"}, without=decayed),
        Addition(
            "skip_scale stream, gain (goal 1.02)",
            batch,
            {"schedule": "gain", "alpha_min": 0.7, "skip_scale": "stream"},
            without={"schedule": "gain", "alpha_min": 0.7},
        ),
        Addition("LayerSync (goal 1.03)", batch, decayed, lambda folder: [LayerSync()]),
        Addition("DispersiveLoss (goal 1.05)", pairs, decayed, lambda folder: [DispersiveLoss()]),
        Addition("REPA, MAE of 6 blocks", batch, decayed, lambda folder: [REPA(str(write_teacher(folder)))]),
    ]


def cases(setting: Setting) -> Iterator[Case]:
    """Yield a case for each addition."""
    for addition in additions(setting):
        with TemporaryDirectory() as folder:
            yield addition_case(addition, setting, Path(folder))


def addition_case(addition: Addition, setting: Setting, folder: Path) -> Case:
    """Build both sides of an addition."""
    sides = {
        "with": (addition.network, addition.losses(folder)),
        "without": (addition.network if addition.without is None else addition.without, ()),
    }
    runs = {}
    for side, (arguments, losses) in sides.items():
        net = build_net(setting, arguments)
        precision = default_precision(net, setting.device)
        batch = images(net, addition.batch, setting.device)
        step = StepWithLosses(build_task(net, losses, addition.batch), batch, setting.device)
        runs[side] = partial(step, precision == "bf16")
    compared = Compared(f"default ({precision})", "with", "without", NOT_COMPARED, rate=precision, cost=True)
    return Case(addition.name, addition.batch, runs, [compared], pairs=setting.size(cpu=15, gpu=31, quick=2))


def build_net(setting: Setting, arguments: dict[str, Any]) -> UViT:
    """Return a U-ViT of 65 tokens in which no layer is silent: width 128 on CPUs, 512 on GPUs."""
    torch.manual_seed(0)
    width = setting.size(cpu=128, gpu=512, quick=16)
    depth = setting.size(cpu=6, gpu=12, quick=2)
    net = UViT(16, 2, 3, dim=width, depth=depth, heads=width // 16, init="xavier", zero_init=False, **arguments)
    return net.to(setting.device)


def build_task(net: UViT, losses: Sequence[AuxiliaryLoss], micro_batch: int) -> DiffusionTask:
    """Return the task of a network with auxiliary losses, in training mode."""
    task = DiffusionTask(net, VP(), "eps", optim=OPTIM, auxiliary=[*losses]).train()
    for loss in losses:
        if isinstance(loss, DispersiveLoss):
            loss.images = micro_batch  # `prepare` does so for the data of a run
    task.auxiliary.to(next(net.parameters()).device)
    return task


def write_teacher(folder: Path) -> Path:
    """Write a checkpoint of an MAE with random weights: 6 blocks of width 192 on the images of `build_net`."""
    torch.manual_seed(1)
    net = MAE(16, 2, 3, dim=192, depth=6, heads=3, decoder_dim=48, decoder_depth=1, decoder_heads=3)
    card = ModelCard(
        net=Spec.of(MAE, net.config),
        path=None,
        prediction=None,
        sampling=None,
        data="none",
        step=0,
        weights="raw",
        class_names=(),
        latents=None,
    )
    path = folder / "teacher.safetensors"
    save_tensors(path, net.state_dict(), {KEY: json.dumps(card.to_dict())})
    return path


class StepWithLosses(OurStep):
    """A training step whose loss has the auxiliary losses of the task."""

    def loss(self) -> Tensor:
        loss, auxiliary = self.task._compute_losses(self.batch)
        return loss + self.task.auxiliary.sum_weighted(auxiliary) if auxiliary else loss
