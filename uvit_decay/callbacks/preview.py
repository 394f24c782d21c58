"""Labelled grids of samples from fixed noise, so that images of different steps can be compared."""

from __future__ import annotations

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from PIL.Image import Image

from uvit_decay.callbacks.ema import averaged
from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.diffusion.nfe import total_nfe
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.image_io import grid_columns, labelled_grid, save_image
from uvit_decay.runtime.distributed import Processes, batches
from uvit_decay.runtime.errors import MOST_SEED, check_whole
from uvit_decay.runtime.files import check_writable
from uvit_decay.samples import Samples
from uvit_decay.sampling_options import LARGEST_GRID
from uvit_decay.tasks.diffusion import DiffusionTask


class Preview(Periodic):
    """A grid of samples: samples.png (the newest) and samples/step_N.png in the run folder, and in TensorBoard.

    The grid of a class-conditional network has a column for each of its first classes. Latents are shown through a
    linear map to RGB, small and rough, so that no autoencoder takes memory during training; sample.py decodes them.

    Args:
        every_n_steps: optimizer steps between grids; 0 means only at the end.
        at_end: make a grid when training ends, too.
        rows: rows of the grid.
        columns: columns of the grid.
        sampling: null means the task's.
        seed: seed of the noise; image i is that of sample.py with this seed and these classes.
        batch_size: images per batch on each device.
    """

    def __init__(
        self,
        every_n_steps: int = 0,
        at_end: bool = True,
        rows: int = 10,
        columns: int = 10,
        sampling: Sampling | None = None,
        seed: int = 0,
        batch_size: int = 128,
    ) -> None:
        super().__init__(every_n_steps, at_end, sampling)
        check_whole(1, LARGEST_GRID, rows=rows, columns=columns, batch_size=batch_size)
        check_whole(1, LARGEST_GRID, images=rows * columns)
        check_whole(0, MOST_SEED, seed=seed)
        self.rows, self.columns, self.seed, self.batch_size = rows, columns, seed, batch_size

    def _columns(self, trainer: Trainer, task: DiffusionTask) -> tuple[tuple[str, ...], int]:
        """Return the names of the classes shown (none for an unconditional network) and the number of columns."""
        names = trainer.datamodule.class_names[: self.columns] if task.net.num_classes else ()
        return names, grid_columns(len(names), self.columns)

    def nfe(self, trainer: Trainer, task: DiffusionTask) -> int:
        return total_nfe(self.rows * self._columns(trainer, task)[1], self.sampling_for(task))

    def evaluate(self, trainer: Trainer, task: DiffusionTask) -> None:
        names, columns = self._columns(trainer, task)
        sampling, processes = self.sampling_for(task), Processes.current()
        with averaged(trainer, task) as weights:
            classes, decode = range(len(names)), trainer.datamodule.preview
            samples = Samples(task.source(), sampling, weights, classes, seed=self.seed, decode=decode)
            jobs = batches(self.rows * columns, self.batch_size, processes.size)
            parts = list(processes.map_ordered(jobs, lambda part: samples.images(part).cpu()))
        if processes.is_main:
            self._save(trainer, labelled_grid(torch.cat(parts), columns, names * (columns // max(1, len(names)))))

    def _save(self, trainer: Trainer, grid: Image) -> None:
        path = self.folder / "samples" / f"step_{trainer.global_step:08d}.png"
        check_writable(path)
        save_image(path, grid)
        save_image(self.folder / "samples.png", grid)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("samples", np.asarray(grid), trainer.global_step, dataformats="HWC")
