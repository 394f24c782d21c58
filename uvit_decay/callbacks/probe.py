"""What the network has learned to see: linear probes at every layer and a grid of noise levels."""

from __future__ import annotations

import csv
from collections.abc import Sequence

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from uvit_decay.callbacks.ema import averaged
from uvit_decay.callbacks.periodic import Periodic, gather_objects
from uvit_decay.data.steps import ImageSet, subset
from uvit_decay.errors import UserError
from uvit_decay.metrics.probe import logistic_probe, ridge_probe
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
        max_train: at most so many training pictures, a fixed random choice.
        max_test: at most so many test pictures, a fixed random choice.
        seed: of the noise.
        batch_size: pictures at a time on each device.

    Raises:
        UserError: a time outside (0, 1), data without classes or without a test set, a network without stages or null
            label.
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
        if task.net.num_classes and not task.net.null_label:
            raise UserError("probes read features under the null label: set null_label to true, or remove LinearProbes")
        if trainer.datamodule.test is None or len(trainer.datamodule.class_names) < 2:
            raise UserError(
                "probes need test pictures of two classes or more: set --data.test_path or --data.holdout 0.1, or "
                "remove LinearProbes"
            )

    def _chosen(self, trainer: Trainer) -> tuple[list[int], list[int]]:
        data = trainer.datamodule
        return subset(data.train, self.max_train, "probe train"), subset(data.test, self.max_test, "probe test")

    def evaluations(self, trainer: Trainer, task: DiffusionTask) -> int:
        return sum(map(len, self._chosen(trainer))) * len(self.times)

    def look(self, trainer: Trainer, task: DiffusionTask) -> None:
        """Each rank takes its share of the noise levels; only scores travel."""
        data = trainer.datamodule
        train, test = self._chosen(trainer)
        labels, test_labels = data.train.labels[train], data.test.labels[test]
        mine = self.my_share(trainer, len(self.times))
        features: dict[int, tuple[Tensor, Tensor]] = {}
        rows: list[Tensor] = []
        with averaged(trainer, task):  # once, since levels may be more on one rank than on another
            for level in mine:
                features[level] = (
                    self._features(task, data.train, train, "train", level),
                    self._features(task, data.test, test, "test", level),
                )
        for pair in features.values():
            scores = ridge_probe(pair[0], labels, pair[1], test_labels)
            ranks = torch.tensor([effective_rank(cell, centre="feature", exp=True) for cell in pair[1]])
            rows.append(torch.stack([scores.held_out, scores.test, scores.ridge, ranks]))
        # (levels, 4, layers): held-out accuracy, test accuracy, ridge, effective rank
        table = torch.stack([row for rank in gather_objects(trainer, rows) for row in rank])
        level, layer = divmod(int(table[:, 0].argmax()), table.shape[2])
        logistic = None
        if level in mine:
            cell, unseen = (side[layer] for side in features[level])
            logistic = logistic_probe(cell, labels, unseen, test_labels)
        logistic = next(value for value in gather_objects(trainer, logistic) if value is not None)
        if trainer.is_global_zero:
            self._report(trainer, task, table, (level, layer), logistic)

    @torch.no_grad()
    def _features(self, task: DiffusionTask, images: ImageSet, chosen: list[int], split: str, level: int) -> Tensor:
        """Float32 (stages, n, d) on the CPU, of the pictures `chosen` at the noise level times[level]."""
        parts = []
        for start in range(0, len(chosen), self.batch_size):
            part = chosen[start : start + self.batch_size]
            x = task.trainer.datamodule.network_input(images[part][0].to(task.device))
            noise = [torch.randn(x.shape[1:], generator=generator("probe", self.seed, split, level, i)) for i in part]
            t = torch.full((len(x),), self.times[level], device=x.device)
            x_t = task.path.noised(x, torch.stack(noise).to(x), t)
            parts.append(pooled_features(task.net, x_t, t).cpu())
        return torch.cat(parts, dim=1)

    def _report(
        self, trainer: Trainer, task: DiffusionTask, table: Tensor, best: tuple[int, int], logistic: float
    ) -> None:
        level, layer = best
        test = float(table[level, 1, layer])
        middle = len(task.net.stages) // 2  # U-ViT's middle block, SiT's last encoder block
        middle_rank = float(table[:, 3, middle].mean())
        values = {
            "probe/best_test_accuracy_ridge": test,
            "probe/best_test_accuracy_logistic": logistic,
            "probe/middle_effective_rank": middle_rank,
        }
        for logger in trainer.loggers:
            logger.log_metrics(values, trainer.global_step)
        self._save(trainer, task, table, best)
        rank_zero_info(
            f"LinearProbes at step {trainer.global_step}: best cell {task.net.stages[layer].name} at t = "
            f"{self.times[level]:g}: test accuracy {test:.3f} (ridge), {logistic:.3f} (logistic regression); "
            f"mean effective rank after {task.net.stages[middle].name} {middle_rank:.2f}"
        )

    def _save(self, trainer: Trainer, task: DiffusionTask, table: Tensor, best: tuple[int, int]) -> None:
        stages = task.net.stages
        with (self.folder / "probes.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for t, (held_out, test, ridge, ranks) in zip(self.times, table.tolist(), strict=True):
                for layer, stage in enumerate(stages):
                    scores = (
                        f"{held_out[layer]:.4f}",
                        f"{test[layer]:.4f}",
                        f"{ridge[layer]:g}",
                        f"{ranks[layer]:.4f}",
                    )
                    writer.writerow([layer, stage.name, stage.kind, t, *scores])
        heat_map(
            self.folder / "probes.png",
            100 * table[:, 1].T,
            rows=[stage.name for stage in stages],
            columns=[f"{t:g}" for t in self.times],
            labels=("noise level t", "features after"),
            title=f"Linear probe, test accuracy in % (step {trainer.global_step})",
            marked=best[::-1],
        )
