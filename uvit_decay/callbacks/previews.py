"""Pictures while training: samples of a denoiser, reconstructions of a masked autoencoder."""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer

from uvit_decay.callbacks.ema import averaged
from uvit_decay.callbacks.periodic import Periodic, PeriodicSampling, save_picture
from uvit_decay.class_names import in_words
from uvit_decay.data import ImageData
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.image_io import grid_columns, labelled_grid
from uvit_decay.representations.reconstruction import Reconstructor
from uvit_decay.runtime.distributed import Processes, batches
from uvit_decay.runtime.errors import MOST_SEED, UserError, check_whole
from uvit_decay.runtime.random import subset
from uvit_decay.samples import Samples
from uvit_decay.sampling_options import LARGEST_GRID
from uvit_decay.tasks import MAETask, Task
from uvit_decay.tasks.diffusion import DiffusionTask


class Preview(PeriodicSampling):
    """A grid of samples: samples.png (the newest) and samples/step_N.png in the run folder, and in the loggers.

    The grid of a class-conditional network has a column for each of its first classes. Latents are shown through a
    linear map to RGB, small and rough, so that no autoencoder takes memory during training; sample.py decodes them.

    Args:
        rows: rows of the grid.
        columns: columns of the grid.
        seed: seed of the noise; image i is that of sample.py with this seed and these classes.
        batch_size: images per batch on each device.
        sampling: how to sample; null means the task's.
        every_n_steps: optimizer steps between evaluations; 0 means only at the end.
        at_end: evaluate when training ends, too.
        every_n_epochs: epochs between further evaluations; null means none.
    """

    picture = "samples"
    reads_images = False

    def __init__(
        self,
        rows: int = 10,
        columns: int = 10,
        seed: int = 0,
        batch_size: int = 128,
        sampling: Sampling | None = None,
        every_n_steps: int = 0,
        at_end: bool = True,
        every_n_epochs: int | None = None,
    ) -> None:
        super().__init__(sampling, every_n_steps, at_end, every_n_epochs)
        check_whole(1, LARGEST_GRID, rows=rows, columns=columns, batch_size=batch_size)
        check_whole(1, LARGEST_GRID, images=rows * columns)
        check_whole(0, MOST_SEED, seed=seed)
        self.rows, self.columns, self.seed, self.batch_size = rows, columns, seed, batch_size

    def _columns(self, trainer: Trainer, task: DiffusionTask) -> tuple[tuple[str, ...], int]:
        """Return the names of the classes shown (none for an unconditional network) and the number of columns."""
        names = task.data.class_names[: self.columns] if task.net.num_classes else ()
        return names, grid_columns(len(names), self.columns)

    def samples(self, trainer: Trainer, task: DiffusionTask) -> int:
        return self.rows * self._columns(trainer, task)[1]

    def evaluate(self, trainer: Trainer, task: DiffusionTask) -> None:
        names, columns = self._columns(trainer, task)
        sampling, processes = self.sampling_for(task), Processes.current()
        with averaged(trainer, task) as weights:
            classes, decode = range(len(names)), task.data.preview
            samples = Samples(task.source(), sampling, weights, classes, seed=self.seed, decode=decode)
            jobs = batches(self.rows * columns, self.batch_size, processes.size)
            parts = list(processes.map_ordered(jobs, lambda part: samples.images(part).cpu()))
        if processes.is_main:
            headings = in_words(names) * (columns // max(1, len(names)))
            grid = labelled_grid(torch.cat(parts), columns, headings)
            save_picture(trainer, self.folder, self.picture, grid)


class Reconstructions(Periodic):
    """A grid of images, masked images and reconstructions, the paper's Figure 6, always of the same images and masks.

    Writes reconstructions.png (the newest) and reconstructions/step_N.png in the run folder, and to the loggers. The
    images are test images if there are any, else training images. Visible patches are those of the image, and removed
    ones the decoder's; if it predicts normalised patches, they get mean and variance of the image's own.

    Args:
        num: images, a fixed random choice.
        mask_ratio: share of removed patches, in (0, 1); null: that of the training.
        seed: seed of the masks.
        batch_size: images per batch.
        every_n_steps: optimizer steps between evaluations; 0 means only at the end.
        at_end: evaluate when training ends, too.
        every_n_epochs: epochs between further evaluations; null means none.
    """

    picture = "reconstructions"

    def __init__(
        self,
        num: int = 16,
        mask_ratio: float | None = None,
        seed: int = 0,
        batch_size: int = 64,
        every_n_steps: int = 0,
        at_end: bool = True,
        every_n_epochs: int | None = None,
    ) -> None:
        super().__init__(every_n_steps, at_end, every_n_epochs)
        check_whole(1, LARGEST_GRID, num=num, batch_size=batch_size)
        check_whole(0, MOST_SEED, seed=seed)
        self.num, self.mask_ratio, self.seed, self.batch_size = num, mask_ratio, seed, batch_size

    def ready(self, trainer: Trainer, task: Task) -> None:
        """Raise a UserError before training if the task is not of an MAE, or the masks leave no patch."""
        if not isinstance(task, MAETask):
            kind = type(task).__name__
            raise UserError(f"Reconstructions are of masked images, which a {kind} has not: remove the callback")
        self._reconstructor(trainer, task)

    def _reconstructor(self, trainer: Trainer, task: MAETask) -> Reconstructor:
        ratio = task.mask_ratio if self.mask_ratio is None else self.mask_ratio
        return Reconstructor(task.net, ratio, self.seed, self.precision(task), trainer.datamodule.preview)

    def evaluations(self, trainer: Trainer, task: MAETask) -> int:
        data: ImageData = trainer.datamodule
        return min(self.num, len(data.test or data.train))

    def evaluate(self, trainer: Trainer, task: MAETask) -> None:
        """Make the grid on rank 0 alone: it is small."""
        data: ImageData = trainer.datamodule
        images = data.test or data.train
        with averaged(trainer, task):
            if not Processes.current().is_main:
                return
            picture = self._reconstructor(trainer, task).picture(
                lambda part: data.network_input(images[part][0].to(task.device)),
                subset(images, self.num, "reconstructions"),
                self.batch_size,
            )
        save_picture(trainer, self.folder, self.picture, picture)
