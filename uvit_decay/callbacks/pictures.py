"""Pictures that callbacks make: the newest in the run folder, those of all steps beside it, and in the loggers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from lightning.pytorch import Trainer
from PIL.Image import Image

from uvit_decay.image_io import save_image
from uvit_decay.runtime.files import check_writable


def picture_path(folder: Path, name: str, step: int) -> Path:
    """Return the file of a picture of a step in the run folder."""
    return folder / name / f"step_{step:08d}.png"


def save_picture(trainer: Trainer, folder: Path, name: str, picture: Image) -> None:
    """Save <name>.png, the newest, and <name>/step_N.png in the run folder; for rank 0 alone.

    They go to every logger, too, that takes images: by `log_image`, as W&B's, or as TensorBoard's.
    """
    path = picture_path(folder, name, trainer.global_step)
    check_writable(path)
    save_image(folder / f"{name}.png", picture)
    for logger in trainer.loggers:
        if log_image := getattr(logger, "log_image", None):
            log_image(key=name, images=[picture], step=trainer.global_step)
        elif add_image := getattr(logger.experiment, "add_image", None):
            add_image(name, np.asarray(picture), trainer.global_step, dataformats="HWC")
    save_image(path, picture)  # last: a resumed run takes it as the sign that all is done
