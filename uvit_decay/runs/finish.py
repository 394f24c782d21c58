"""Results that a run lacks at its end: a kill came after the last checkpoint and before an evaluation was recorded.

A resumed run makes them without training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.data.datamodule import ImageData
from uvit_decay.runs.history import run_of
from uvit_decay.runtime.errors import RunEnded


@runtime_checkable
class HasLastResult(Protocol):
    """Callback that leaves a result at the end of a run."""

    def lacks_result(self, folder: Path, step: int, data: ImageData | None = None) -> bool:
        """Return whether the run in `folder` ends at `step` and lacks this callback's result.

        Args:
            folder: folder of the run.
            step: its last step.
            data: its data, which may rule a result out; None if they are not read yet.
        """


class HooksOfTheEnd:
    """Replacement of the training loop's `run`, which skips all hooks at the end of a run: the hooks without a step."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop

    def __call__(self) -> None:
        # Callbacks evaluate in the hooks at the start and the end of training, and ask for the length of the epochs.
        self.loop.setup_data()
        self.loop.on_run_start()
        self.loop.on_run_end()


def is_finishing(trainer: Trainer) -> bool:
    """Return whether this run only makes the results that an interrupted run lacks at its end."""
    return isinstance(trainer.fit_loop.run, HooksOfTheEnd)


def find_missing(
    trainer: Trainer, checkpoint: str | Path | None, step: int, data: ImageData | None = None
) -> list[str]:
    """Return the names of the callbacks without a result, in the run of a checkpoint that ends at `step`.

    Without `data`, callbacks that leave out their result for these data are among them.
    """
    folder = run_of(checkpoint) if checkpoint else None
    if folder is None or trainer.fast_dev_run:
        return []
    results = [callback for callback in trainer.callbacks if isinstance(callback, HasLastResult)]
    return [type(callback).__name__ for callback in results if callback.lacks_result(folder, step, data)]


def finish(trainer: Trainer, step: int, flag: str) -> None:
    """Prepare the trainer to make the missing results of a run that ends at `step`; all ranks must call this.

    Raises:
        RunEnded: no result is missing; `flag` is the flag that makes the run longer.
    """
    # The first process decides for all: on another node the files may not be visible yet.
    missing = trainer.strategy.broadcast(find_missing(trainer, trainer.ckpt_path, step, trainer.datamodule))
    if not missing:
        raise RunEnded(f"the checkpoint is at step {step}, the end of the run: set {flag} higher to resume")
    rank_zero_info(f"the checkpoint is at step {step}, the end of the run: evaluating for {', '.join(missing)}")
    trainer.fit_loop.run = HooksOfTheEnd(trainer.fit_loop)
