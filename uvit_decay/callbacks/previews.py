"""Pictures while training: samples of a denoiser, reconstructions of a masked autoencoder."""

from __future__ import annotations

from typing import Annotated

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from uvit_decay.callbacks.ema import evaluation_weights
from uvit_decay.callbacks.periodic import Periodic, PeriodicSampling, save_picture
from uvit_decay.data import ImageData
from uvit_decay.data.classes import in_words
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.generation.options import LARGEST_GRID
from uvit_decay.generation.samples import Samples
from uvit_decay.pictures import grid_columns, labelled_grid
from uvit_decay.representations.reconstruction import Reconstructor
from uvit_decay.runtime.distributed import Processes, batches
from uvit_decay.runtime.random import subset
from uvit_decay.tasks import MAETask, Task
from uvit_decay.tasks.diffusion import DiffusionTask
from uvit_decay.terminal.errors import check_whole
from uvit_decay.terminal.typed import Bounds, Seed, Within, check_types


@check_types
class Preview(PeriodicSampling):
    """A grid of samples: samples.png (the newest) and samples/step_N.png in the run folder, and in the loggers.

    The grid of a class-conditional network has a column for each of its first classes. Latents are shown through a
    linear map to RGB, small and rough, so that no autoencoder takes memory during training; sample.py decodes them.

    Args:
        rows: rows of the grid.
        columns: columns of the grid.
        seed: seed of the noise; image i equals image i of sample.py with this seed and these classes.
        batch_size: images per batch on each device.
        sampling: how to sample; null means the task's.
        every_n_steps: optimizer steps between evaluations; 0 means only at the end.
        at_end: evaluate when training ends, too.
        every_n_epochs: epochs between further evaluations; null means none.
    """

    picture = "samples"
    command = "python sample.py --ckpt {checkpoint}"
    reads_images = False

    def __init__(
        self,
        rows: Annotated[int, Bounds(1, LARGEST_GRID)] = 10,
        columns: Annotated[int, Bounds(1, LARGEST_GRID)] = 10,
        seed: Seed = 0,
        batch_size: Annotated[int, Bounds(1, LARGEST_GRID)] = 128,
        sampling: Sampling | None = None,
        every_n_steps: int = 0,
        at_end: bool = True,
        every_n_epochs: int | None = None,
    ) -> None:
        super().__init__(sampling, every_n_steps, at_end, every_n_epochs)
        check_whole(1, LARGEST_GRID, images=rows * columns)
        self.rows = rows
        self.columns = columns
        self.seed = seed
        self.batch_size = batch_size

    def _class_names(self, task: DiffusionTask) -> tuple[str, ...]:
        """Return the names of the classes shown; none for an unconditional network."""
        if not task.net.num_classes:
            return ()
        return task.data.class_names[: self.columns]

    def samples(self, trainer: Trainer, task: DiffusionTask) -> int:
        return self.rows * grid_columns(len(self._class_names(task)), self.columns)

    def evaluate(self, trainer: Trainer, task: DiffusionTask) -> None:
        names = self._class_names(task)
        columns = grid_columns(len(names), self.columns)
        sampling = self.sampling_for(task)
        processes = Processes.current()
        with evaluation_weights(trainer, task) as weights:
            classes = range(len(names))
            samples = Samples(task.source(), sampling, weights, classes, seed=self.seed, decode=task.data.preview)
            jobs = batches(self.rows * columns, self.batch_size, processes.size)
            parts = list(processes.map_ordered(jobs, lambda part: samples.images(part).cpu()))
        if processes.is_main:
            headings = in_words(names) * (columns // max(1, len(names)))
            grid = labelled_grid(torch.cat(parts), columns, headings)
            save_picture(trainer, self.folder, self.picture, grid)


@check_types
class Reconstructions(Periodic):
    """A grid of images, masked images and reconstructions, as in the paper's Figure 6, with fixed images and masks.

    Writes reconstructions.png (the newest) and reconstructions/step_N.png to the run folder and the loggers. The images
    are test images if there are any, otherwise training images. In a reconstruction, visible patches are copied from
    the image, and removed patches are the decoder's output. If the decoder predicts normalised patches, they are
    rescaled to the mean and variance of the original patches.

    Args:
        num: number of images, a fixed random choice.
        mask_ratio: share of removed patches, in (0, 1); null: the mask ratio of the training.
        seed: seed of the masks.
        batch_size: images per batch.
        every_n_steps: optimizer steps between evaluations; 0 means only at the end.
        at_end: evaluate when training ends, too.
        every_n_epochs: epochs between further evaluations; null means none.
    """

    picture = "reconstructions"
    command = "python evaluate.py reconstruct --ckpt {checkpoint} --images {config}:train"

    def __init__(
        self,
        num: Annotated[int, Bounds(1, LARGEST_GRID)] = 16,
        mask_ratio: Annotated[float | None, Within("(0, 1)")] = None,
        seed: Seed = 0,
        batch_size: Annotated[int, Bounds(1, LARGEST_GRID)] = 64,
        every_n_steps: int = 0,
        at_end: bool = True,
        every_n_epochs: int | None = None,
    ) -> None:
        super().__init__(every_n_steps, at_end, every_n_epochs)
        self.num = num
        self.mask_ratio = mask_ratio
        self.seed = seed
        self.batch_size = batch_size

    def prepare_evaluation(self, trainer: Trainer, task: Task) -> None:
        """Raise a UserError before training if the masks leave no patch."""
        self._build_reconstructor(trainer, task)

    def _build_reconstructor(self, trainer: Trainer, task: MAETask) -> Reconstructor:
        ratio = task.mask_ratio if self.mask_ratio is None else self.mask_ratio
        return Reconstructor(task.net, ratio, self.seed, self.precision(task), trainer.datamodule.preview)

    def evaluations(self, trainer: Trainer, task: MAETask) -> int:
        data: ImageData = trainer.datamodule
        return min(self.num, len(data.test or data.train))

    def evaluate(self, trainer: Trainer, task: MAETask) -> None:
        """Compute the grid on rank 0 only: it is small."""
        data: ImageData = trainer.datamodule
        images = data.test or data.train

        def read_images(part: list[int]) -> Tensor:
            pixels, _ = images[part]
            return data.network_input(pixels.to(task.device))

        with evaluation_weights(trainer, task):
            if not Processes.current().is_main:
                return
            chosen = subset(images, self.num, "reconstructions")
            picture = self._build_reconstructor(trainer, task).picture(read_images, chosen, self.batch_size)
        save_picture(trainer, self.folder, self.picture, picture)
