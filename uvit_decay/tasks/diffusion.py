"""The diffusion task: trains a network as a denoiser, for a noise path and a prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from uvit_decay.checkpoint.io import load
from uvit_decay.checkpoint.options import Weights
from uvit_decay.data.batches import Batch
from uvit_decay.diffusion.noise_path import VP, NoisePath
from uvit_decay.diffusion.prediction import (
    UNIFORM,
    Prediction,
    TrainingTimes,
    Weighting,
    check_loss,
    diffusion_loss,
    stratify_times,
    training_times,
)
from uvit_decay.diffusion.sampling import DiffusionModel, Sampling
from uvit_decay.files.instantiate import Spec
from uvit_decay.runtime.random import normal, uniform
from uvit_decay.tasks.base import AUTO, Optimization, Task
from uvit_decay.tasks.losses.auxiliary import AuxiliaryLoss
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Share, check_types


@check_types
class DiffusionTask(Task):
    """Training of any network net(x, t, y) as a denoiser.

    Args:
        net: the network, see `Task`.
        path: the noise path from data to noise; a dataclass.
        prediction: what the network predicts: the noise `eps`, the data `x`, the `velocity` or the `score`.
        weighting: weights of the loss over noise levels: `none`, `velocity` (of eps and score, SiT; of x, JiT) or
            `likelihood` (of eps and score, SiT).
        times: distribution of the times of training.
        label_dropout: share of labels, in [0, 1], that training replaces by the null label; guidance needs it above 0.
        sampling: default sampling of this network, in the callbacks and in sample.py from its checkpoint.
        optim: optimizer and learning rate.
        compile: see `Task`.
        seed: seed of noise, times and label dropout.
        auxiliary: see `Task`.
        init_from: a .ckpt or .safetensors of this project, or an official file, whose weights the network starts
            from; see `adapt`. Classes, channels and image size may differ. Not read when a run resumes.
    """

    def __init__(
        self,
        net: nn.Module,
        path: NoisePath = VP(),  # noqa: B008  frozen
        prediction: Prediction = "eps",
        weighting: Weighting = "none",
        times: TrainingTimes = UNIFORM,
        label_dropout: Share = 0.1,
        sampling: Sampling = Sampling(),  # noqa: B008  frozen
        optim: Optimization = Optimization(),  # noqa: B008  frozen
        compile: bool | str = AUTO,
        seed: int = 0,
        init_from: str | Path | None = None,
        auxiliary: list[AuxiliaryLoss] | None = None,
    ) -> None:
        super().__init__(net, optim, compile, seed, auxiliary)
        self.init_from = init_from
        self.pixels = True  # whether it sees pixels or latents; `setup` asks the data
        if net.num_classes and label_dropout and not net.null_label:
            raise UserError(
                "label_dropout needs a network with a null label: set null_label to true, or the dropout to 0"
            )
        if net.num_classes and label_dropout == 0.0 and sampling.guidance != 1.0:
            raise UserError(
                f"guidance {sampling.guidance:g} needs label_dropout above 0: the null label is never trained"
            )
        check_loss(prediction, weighting)
        self.path = path
        self.prediction = prediction
        self.weighting = weighting
        self.times = times
        self.label_dropout = label_dropout
        self.sampling = sampling

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path, weights: Weights | None = None, trusted: Sequence[str] = (), **given: Any
    ) -> Self:
        """Return a task with the network of a checkpoint and all that sampling from it needs; see `Task`."""
        found = load(Path(checkpoint_path), weights, trusted)
        found.check_denoiser()
        card = found.card
        options = {
            "path": found.path,
            "prediction": card.prediction,
            "weighting": card.weighting or "none",
            "sampling": card.sampling,
        }
        task = cls(found.net, **{**options, **given})
        task.pixels = card.latents is None
        return task.eval()

    def setup(self, stage: str) -> None:
        """Raise a UserError if the network does not fit the sampling or the data."""
        self.pixels = self.data.latents is None
        source = self.source()
        source.check(source.unguided(self.sampling))
        super().setup(stage)

    def loss(self, batch: Batch, stage: str) -> Tensor:
        """Return the mean diffusion loss of a part of a global batch; `stage` is "train" or "val".

        All random numbers are functions of (stage, seed, `batch.sample_ids`), so that the loss of a global batch does
        not depend on how it is divided into ranks and micro-batches. Labels are dropped in training only.
        """
        x = batch.images
        place, drop = uniform(stage, "time, label", self.seed, rows=batch.sample_ids, shape=(2,)).unbind(1)
        place = stratify_times(place, batch.first, batch.total)
        t = training_times(self.path, self.prediction, self.weighting, place, self.times)
        eps = normal(stage, "noise", self.seed, rows=batch.sample_ids, shape=x.shape[1:])
        y = None  # unconditional
        if self.net.num_classes:
            dropped = drop < (self.label_dropout if stage == "train" else 0.0)
            y = torch.where(dropped, self.net.num_classes, batch.labels)
        net = self.observed(batch, t)
        return diffusion_loss(net, self.path, self.prediction, x, y, t, eps, self.weighting).mean()

    def source(self) -> DiffusionModel:
        """Return the network with its current weights as a `DiffusionModel` for the samplers."""
        return DiffusionModel.from_net(self.net, self.path, self.prediction, self.device, self.pixels)

    def function_spec(self) -> dict[str, Any]:
        """Return network, path, prediction and weighting."""
        return {
            **super().function_spec(),
            "path": Spec.of(type(self.path), dataclasses.asdict(self.path)),
            "prediction": self.prediction,
            "weighting": self.weighting,
        }
