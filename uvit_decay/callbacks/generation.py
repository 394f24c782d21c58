"""How good the samples are while the network trains: Frechet distance, Inception Score, label consistency."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from uvit_decay.callbacks.ema import averaged
from uvit_decay.callbacks.periodic import Periodic, gather_objects, image_evaluations
from uvit_decay.data.steps import ImageSet, subset
from uvit_decay.diffusion.generate import Counted, Sampling, generate
from uvit_decay.errors import UserError
from uvit_decay.image import to_uint8
from uvit_decay.metrics.features import Extractor, Inception, SmallClassifier
from uvit_decay.metrics.frechet import FrechetDistance
from uvit_decay.metrics.inception import InceptionScore
from uvit_decay.tasks.diffusion import DiffusionTask


class GenerationMetrics(Periodic):
    """Samples `num` images on all ranks and compares them with the training set; writes generation.json.

    A class-conditional network is asked for its classes in turn. All numbers are proxies of the published protocols:
    their keys say how they were made.

    Args:
        extractor: `Inception` for RGB photographs, `SmallClassifier` for small pictures such as digits.
        num: images.
        reference: at most so many training pictures to compare with, a fixed random choice.
        every_n_steps: optimizer steps between measurements; 0 means only at the end.
        at_end: measure when training ends, too.
        sampling: null means the task's.
        seed: of the samples.
        batch_size: images at a time on each device.

    Raises:
        UserError: fewer than 10 images, which the Inception Score splits, or fewer than devices; latents instead of
            pictures.
    """

    def __init__(
        self,
        extractor: Inception | SmallClassifier,
        num: int = 2000,
        reference: int = 50_000,
        every_n_steps: int = 0,
        at_end: bool = True,
        sampling: Sampling | None = None,
        seed: int = 1,
        batch_size: int = 256,
    ) -> None:
        super().__init__(every_n_steps, at_end, sampling)
        self.extractor: Extractor = extractor
        self.num, self.reference, self.seed, self.batch_size = num, reference, seed, batch_size
        self._real: FrechetDistance | None = None

    def evaluations(self, trainer: Trainer, task: DiffusionTask) -> int:
        return image_evaluations(self.num, self.sampling_for(task))

    def on_fit_start(self, trainer: Trainer, task: DiffusionTask) -> None:
        """Get the extractor ready now: missing weights are found before the training, not after."""
        if self.num < max(trainer.world_size, 10):
            raise UserError(f"generation metrics need 10 images, and one for each device; got num {self.num}")
        if trainer.datamodule.latents:
            raise UserError("generation metrics compare pictures, and these data are latents: remove GenerationMetrics")
        steps = trainer.estimated_stepping_batches
        if not trainer.fast_dev_run and (self.at_end or 0 < self.every_n_steps <= steps):
            train: ImageSet = trainer.datamodule.train
            if self.extractor.knows_labels and len(trainer.datamodule.class_names) < 2:
                raise UserError(f"{self.extractor.name} features need training pictures of two classes or more")
            chosen = subset(train, self.reference, "reference") if self.extractor.knows_labels else []
            images, labels = train[chosen]
            self.extractor.prepare(images, labels, task.device)

    def look(self, trainer: Trainer, task: DiffusionTask) -> None:
        sampling = self.sampling_for(task)
        distance = self._with_reference(trainer, task)
        score = InceptionScore().to(_metric_device(task.device))
        mine = self.my_share(trainer, self.num)  # contiguous: the Inception Score depends on the order
        labels = [i % task.net.num_classes for i in mine] if task.net.num_classes else None
        right = 0
        with averaged(trainer, task) as weights:
            source = task.source()
            counted = Counted(source.net)
            batches = generate(replace(source, net=counted), sampling, mine, labels, self.seed, self.batch_size)
            for k, batch in enumerate(batches):
                found = self.extractor(to_uint8(batch))
                distance.update(found.features.to(distance.device), real=False)
                score.update(found.logits.to(score.device))
                if labels is not None and self.extractor.knows_labels:
                    wanted = torch.tensor(labels[k * self.batch_size :][: len(batch)], device=batch.device)
                    right += int((found.logits.argmax(1) == wanted).sum())
        values = {"frechet_distance": distance.compute(), "inception_score": score.compute()[0]}
        if labels is not None and self.extractor.knows_labels:
            values["label_consistency"] = sum(gather_objects(trainer, right)) / self.num
        calls = sum(gather_objects(trainer, counted.evaluations)) / self.num
        if trainer.is_global_zero:
            self._save(trainer, values, weights, sampling, int(distance.real_n), calls)

    def _with_reference(self, trainer: Trainer, task: DiffusionTask) -> FrechetDistance:
        """A distance that knows the training set, each rank its part; the features are extracted once."""
        if self._real is None:
            train: ImageSet = trainer.datamodule.train
            self._real = FrechetDistance(self.extractor.dim).to(_metric_device(task.device))
            chosen = subset(train, self.reference, "reference")
            mine = [chosen[i] for i in self.my_share(trainer, len(chosen))]
            for start in range(0, len(mine), self.batch_size):
                images: Tensor = train[mine[start : start + self.batch_size]][0]
                features = self.extractor(images.to(task.device)).features
                self._real.update(features.to(self._real.device), real=True)
        return copy.deepcopy(self._real)

    def _save(
        self,
        trainer: Trainer,
        values: dict[str, float],
        weights: str,
        sampling: Sampling,
        reference: int,
        calls: float,
    ) -> None:
        entry: dict[str, Any] = {
            "step": trainer.global_step,
            **values,
            "n": self.num,
            "reference": f"{trainer.datamodule.name} train, {reference} pictures",
            "extractor": self.extractor.name,
            "weights": weights,
            **asdict(sampling),
            "steps": sampling.step_count,
            "evaluations": sampling.evaluations,
            "network_calls": calls,  # for each image, both halves of guidance
            "seed": self.seed,
        }
        path = self.folder / "generation.json"
        entries = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*entries, entry], indent=2) + "\n")
        protocol = f"{self.extractor.name}_n{self.num}_{weights}_{sampling.describe()}"
        for logger in trainer.loggers:
            logger.log_metrics({f"{name}/{protocol}": v for name, v in values.items()}, trainer.global_step)
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in values.items())
        rank_zero_info(f"GenerationMetrics at step {trainer.global_step}: {shown} ({protocol})")


def _metric_device(device: torch.device) -> torch.device:
    """Sums are float64, which Apple's GPUs do not have."""
    return torch.device("cpu") if device.type == "mps" else device
