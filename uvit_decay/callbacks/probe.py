"""Linear probes of a network while it trains, denoiser or encoder, as `evaluate.py probe` computes them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.callbacks.ema import evaluation_weights
from uvit_decay.callbacks.periodic import Periodic, record
from uvit_decay.data import ImageData
from uvit_decay.nn.intermediates import Pool, layer_indices
from uvit_decay.representations.grid import PROBES_PICTURE, Grid
from uvit_decay.representations.noise import NOISE_PICTURE, NOISE_SHARE, NoiseTable, measure_noise_share
from uvit_decay.representations.probe_options import Probing
from uvit_decay.representations.probing import Prober, check_probed, choose_images, default_layer
from uvit_decay.runs.history import PROBES, name_run
from uvit_decay.runs.loggers import log_picture
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.precision import Precision
from uvit_decay.tasks.base import Task
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import check_types


@check_types
class LinearProbes(Periodic):
    """Linear classifier, k nearest neighbours and effective rank of pooled features, for each grid point (layer, t).

    Features are computed with the EMA weights if the run keeps them. A denoiser gets the null label and one fixed noise
    for each image and noise level. An encoder, such as an MAE's, sees clean images; its grid points have t = 0. The l2
    penalty and the best grid point are chosen on a held-out part of the training images. Without classes or test images
    nothing is probed, and a line says so. Writes the newest grid points to probes.csv and probes.png, and adds a line
    to probes.jsonl. With `noise_draws`, the noise share of each grid point is measured, too, and written to
    noise_share.csv and noise_share.png. Logs the test accuracy of the best grid point, and the scores of the tracked
    layer, averaged over the noise levels. On a CPU, cores that torch's threads leave idle compute further noise levels.

    Args:
        times: noise levels t in (0, 1) of a denoiser; null: 0.01, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5. Leave them out
            for an encoder.
        watch: number or name of the tracked layer, whose scores are logged; null: the last of `layers` if they are
            given, otherwise U-ViT's middle block, SiT's last encoder block, or an encoder's last block.
        layers: numbers or names of the layers to probe; null: all.
        pool: `mean` of the patch tokens (null), of `all` tokens, or the class token (`cls`).
        max_train: largest number of training images, a fixed random choice.
        max_test: largest number of test images, a fixed random choice.
        neighbours: k of the nearest neighbours.
        seed: seed of the noise.
        batch_size: images per batch on each device.
        precision: precision of the network; null: as the task samples, otherwise the default of evaluations.
        every_n_steps: optimizer steps between evaluations; 0 means only at the end.
        at_end: evaluate when training ends, too.
        every_n_epochs: epochs between further evaluations; null means none.
        noise_draws: noise draws of each image for the noise share of a denoiser's layers, at least 2; null: it is not
            measured.
        noise_images: test images for the noise share, a fixed random choice.
    """

    history_file = PROBES
    command = "python evaluate.py probe --ckpt {checkpoint} --data {config}"

    def __init__(
        self,
        times: Sequence[float] | None = None,
        watch: int | str | None = None,
        layers: Sequence[int | str] | None = None,
        pool: Pool | None = None,
        max_train: int = 10_000,
        max_test: int = 5_000,
        neighbours: int = Probing.neighbours,
        seed: int = Probing.seed,
        batch_size: int = Probing.batch_size,
        precision: Precision | None = None,
        every_n_steps: int = 0,
        at_end: bool = True,
        every_n_epochs: int | None = None,
        noise_draws: int | None = None,
        noise_images: int = Probing.noise_images,
    ) -> None:
        super().__init__(every_n_steps, at_end, every_n_epochs)
        self.probing = Probing(
            times=None if times is None else tuple(times),
            layers=None if layers is None else tuple(map(str, layers)),
            pool=pool or Probing.pool,
            max_train=max_train,
            max_test=max_test,
            neighbours=neighbours,
            seed=seed,
            batch_size=batch_size,
            noise_draws=noise_draws,
            noise_images=noise_images,
        )
        self.batch_size = batch_size
        self.watch = watch
        self.asked = precision

    def prepare_evaluation(self, trainer: Trainer, task: Task) -> None:
        """Raise a UserError before training if network or data cannot be probed; a fast_dev_run does not probe."""
        if not trainer.fast_dev_run:
            check_probed(task.net, task.path, trainer.datamodule, self.probing)
            self._find_tracked_layer(task)

    def find_obstacle(self, data: ImageData) -> str | None:
        if len(data.class_names) < 2:
            return f"they need two classes or more, these images have {len(data.class_names)}"
        if data.test is None:
            return "they need test images, such as `holdout` 0.1"
        return None

    def _find_tracked_layer(self, task: Task) -> int:
        """Return the number of the tracked layer; raise a UserError if it is not probed."""
        layers = layer_indices(task.net.layers, self.probing.layers)
        if self.watch is not None:
            (tracked,) = layer_indices(task.net.layers, (str(self.watch),))
            if tracked not in layers:
                raise UserError(f"watch {self.watch} of LinearProbes: this layer is not among its `layers`; add it")
            return tracked
        if self.probing.layers is not None:
            return layers[-1]
        return default_layer(task.net, task.path)

    def evaluations(self, trainer: Trainer, task: Task) -> int:
        data: ImageData = trainer.datamodule
        noisy = (self.probing.noise_draws or 0) * min(self.probing.noise_images, len(data.test))
        images = sum(map(len, choose_images(self.probing, data))) + noisy
        return images * len(self.probing.levels(task.path is None))

    def evaluate(self, trainer: Trainer, task: Task) -> dict[str, float] | None:
        """Probe on all ranks: each rank computes its share of the noise levels and sends only scores to rank 0."""
        precision = self.precision(task)
        with evaluation_weights(trainer, task) as weights:
            data, processes = trainer.datamodule, Processes.current()
            grid = Prober(task.net, task.path, data, self.probing, task.device, precision).grid(processes)
            noise = None
            if self.probing.noise_draws:
                noise = measure_noise_share(task.net, task.path, data, self.probing, task.device, precision, processes)
        if grid is None:
            return None
        return self._report(trainer, task, grid, noise, weights)

    def _report(
        self, trainer: Trainer, task: Task, grid: Grid, noise: NoiseTable | None, weights: str
    ) -> dict[str, float]:
        """Save and log the results, and return the recorded values; only rank 0 may call this."""
        best = grid.summary()
        number = self._find_tracked_layer(task)
        layer = grid.layers[number].name
        values = {
            "best_accuracy": best["test_accuracy"],
            "best_on_test_accuracy": best["best_on_test_accuracy_of_all_cells"],
        }
        shown = []
        averages = grid.average_layer(number)
        if noise is not None:
            averages[NOISE_SHARE] = noise.average(NOISE_SHARE, number)
        for name, value in averages.items():
            values[f"tracked_{name}"] = value
            shown.append(f"{name.replace('_', ' ')} {value:.3f}")
        metadata = {**grid.protocol, "weights": weights, "tracked": layer, "best": best}
        logged = {f"probe/{name}": value for name, value in values.items()}
        title = f"{name_run(self.folder)}, step {trainer.global_step}"
        grid.save(self.folder, title)
        log_picture(trainer, self.folder / PROBES_PICTURE)
        if noise is None:
            NoiseTable.remove(self.folder)
        else:
            noise.save(self.folder, title)
            metadata["noise_share"] = noise.protocol["noise_share"]
            log_picture(trainer, self.folder / NOISE_PICTURE)
        record(trainer, self.folder / PROBES, values, metadata, logged)
        rank_zero_info(
            f"LinearProbes at step {trainer.global_step}: best on held-out images {best['name']} at t = {best['t']:g}: "
            f"test accuracy {best['test_accuracy']:.3f}, nearest neighbours {best['knn_accuracy']:.3f}; "
            f"{layer}: {', '.join(shown)}"
        )
        return values
