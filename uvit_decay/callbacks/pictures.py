"""Pictures that callbacks make: the newest in the run folder, those of all steps beside it, and in TensorBoard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from PIL.Image import Image

from uvit_decay.image_io import save_image
from uvit_decay.runtime.files import check_writable


def save_picture(trainer: Trainer, folder: Path, name: str, picture: Image) -> None:
    """Save <name>.png, the newest, and <name>/step_N.png in the run folder, and in TensorBoard; for rank 0 alone."""
    path = folder / name / f"step_{trainer.global_step:08d}.png"
    check_writable(path)
    save_image(path, picture)
    save_image(folder / f"{name}.png", picture)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(name, np.asarray(picture), trainer.global_step, dataformats="HWC")
