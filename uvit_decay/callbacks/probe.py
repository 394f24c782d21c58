"""What the network has learned to see: linear probes at every layer and a grid of noise levels."""

from __future__ import annotations

import csv
from collections.abc import Sequence

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from uvit_decay.callbacks.ema import averaged
from uvit_decay.callbacks.periodic import Periodic, gather_objects
from uvit_decay.data.steps import ImageSet
from uvit_decay.errors import UserError
from uvit_decay.image import to_float
from uvit_decay.metrics.probe import ProbeScores, logistic_probe, ridge_probe
from uvit_decay.metrics.rank import effective_rank
from uvit_decay.nn.tap import Tapped, pooled_features
from uvit_decay.plots import heat_map
from uvit_decay.randomness import generator
from uvit_decay.tasks.diffusion import DiffusionTask

COLUMNS = ("layer", "name", "kind", "t", "held_out_accuracy", "test_accuracy", "ridge", "effective_rank")


class LinearProbes(Periodic):
    """A ridge classifier on mean patch tokens for each (layer, t); writes probes.csv and probes.png.

    EMA weights, null label, one fixed noise for each picture and level. Ridge and best cell are chosen on a held-out
    part of the training pictures; the test accuracy of the best cell is reported, by ridge and by logistic regression.
    Effective ranks are exp(entropy) of the test features, centred over the pictures: a number of dimensions.

    Args:
        times: noise levels t in (0, 1).
        every_n_steps: optimizer steps between probes; 0 means only at the end.
        at_end: probe when training ends, too.
        max_train: at most so many training pictures, the first ones.
        max_test: at most so many test pictures, the first ones.
        seed: of the noise.
        batch_size: pictures at a time on each device.

    Raises:
        UserError: a time outside (0, 1), data without labels or without a test set, a network that has no stages.
    """

    def __init__(
        self,
        times: Sequence[float] = (0.01, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5),
        every_n_steps: int = 0,
        at_end: bool = True,
        max_train: int = 10_000,
        max_test: int = 5_000,
        seed: int = 0,
        batch_size: int = 256,
    ) -> None:
        super().__init__(every_n_steps, at_end)
        if not times or not all(0.0 < t < 1.0 for t in times):
            raise UserError(f"probe times must lie in (0, 1), got {list(times)}")
        self.times, self.max_train, self.max_test = tuple(times), max_train, max_test
        self.seed, self.batch_size = seed, batch_size

    def on_fit_start(self, trainer: Trainer, task: DiffusionTask) -> None:
        if not isinstance(task.net, Tapped):
            raise UserError(f"{type(task.net).__name__} has no stages to probe: remove LinearProbes from the callbacks")
        if trainer.datamodule.test is None or not trainer.datamodule.class_names:
            raise UserError(
                "probes need labelled test pictures: set --data.test_path or --data.holdout 0.1, or remove LinearProbes"
            )

    def _counts(self, trainer: Trainer) -> tuple[int, int]:
        data = trainer.datamodule
        return min(len(data.train), self.max_train), min(len(data.test), self.max_test)

    def evaluations(self, trainer: Trainer, task: DiffusionTask) -> int:
        return sum(self._counts(trainer)) * len(self.times)

    def look(self, trainer: Trainer, task: DiffusionTask) -> None:
        data = trainer.datamodule
        n_train, n_test = self._counts(trainer)
        mine = range(trainer.global_rank, len(self.times), trainer.world_size)
        with averaged(trainer, task):
            cells = {
                level: (
                    self._features(task, data.train, n_train, "train", level),
                    self._features(task, data.test, n_test, "test", level),
                )
                for level in mine
            }
        gathered: dict[int, tuple[Tensor, Tensor]] = {}
        for part in gather_objects(trainer, cells):
            gathered |= part
        if trainer.is_global_zero:
            train, test = (torch.cat([gathered[i][side] for i in range(len(self.times))]) for side in (0, 1))
            self._report(trainer, task, train, data.train.labels[:n_train], test, data.test.labels[:n_test])

    @torch.no_grad()
    def _features(self, task: DiffusionTask, images: ImageSet, count: int, split: str, level: int) -> Tensor:
        """Float32 (stages, count, d) on the CPU, at the noise level times[level]."""
        parts = []
        for start in range(0, count, self.batch_size):
            chosen = list(range(start, min(start + self.batch_size, count)))
            x = to_float(images[chosen][0].to(task.device))
            noise = [torch.randn(x.shape[1:], generator=generator("probe", self.seed, split, level, i)) for i in chosen]
            t = torch.full((len(x),), self.times[level], device=x.device)
            x_t = task.path.noised(x, torch.stack(noise).to(x), t)
            parts.append(pooled_features(task.net, x_t, t).cpu())
        return torch.cat(parts, dim=1)

    def _report(
        self, trainer: Trainer, task: DiffusionTask, train: Tensor, y: Tensor, test: Tensor, y_test: Tensor
    ) -> None:
        scores = ridge_probe(train, y, test, y_test)
        ranks = torch.tensor([effective_rank(cell, centre="feature", exp=True) for cell in test])
        best = int(scores.held_out.argmax())
        logistic = logistic_probe(train[best], y, test[best], y_test)
        level, layer = divmod(best, len(task.net.stages))
        middle = next(i for i, stage in enumerate(task.net.stages) if stage.kind == "middle")
        middle_rank = float(ranks.reshape(len(self.times), -1)[:, middle].mean())
        values = {
            "probe/best_test_accuracy_ridge": float(scores.test[best]),
            "probe/best_test_accuracy_logistic": logistic,
            "probe/middle_effective_rank": middle_rank,
        }
        for logger in trainer.loggers:
            logger.log_metrics(values, trainer.global_step)
        self._save(trainer, task, scores, ranks)
        rank_zero_info(
            f"LinearProbes at step {trainer.global_step}: best cell {task.net.stages[layer].name} at t = "
            f"{self.times[level]:g}: test accuracy {float(scores.test[best]):.3f} (ridge), {logistic:.3f} (logistic "
            f"regression); mean effective rank after the middle block {middle_rank:.2f}"
        )
        if len(y_test) < 100:
            rank_zero_warn(f"only {len(y_test)} test pictures: an accuracy step is {1 / len(y_test):.3f}")

    def _save(self, trainer: Trainer, task: DiffusionTask, scores: ProbeScores, ranks: Tensor) -> None:
        stages = task.net.stages
        with (self.folder / "probes.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for cell, (held_out, test, ridge, rank) in enumerate(
                zip(scores.held_out.tolist(), scores.test.tolist(), scores.ridge.tolist(), ranks.tolist(), strict=True)
            ):
                level, layer = divmod(cell, len(stages))
                place = (layer, stages[layer].name, stages[layer].kind, self.times[level])
                writer.writerow([*place, f"{held_out:.4f}", f"{test:.4f}", f"{ridge:g}", f"{rank:.4f}"])
        heat_map(
            self.folder / "probes.png",
            100 * scores.test.reshape(len(self.times), -1).T,
            rows=[stage.name for stage in stages],
            columns=[f"{t:g}" for t in self.times],
            labels=("noise level t", "features after"),
            title=f"Linear probe, test accuracy in % (step {trainer.global_step})",
            marked=divmod(int(scores.held_out.argmax()), len(stages))[::-1],
        )
