"""What this package needs of a task whose run can be resumed, and the checkpoint from which it is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lightning.pytorch import Trainer
from torch import Tensor, nn

from uvit_decay.runs.settings import Settings

if TYPE_CHECKING:
    from uvit_decay.data.datamodule import ImageData


@dataclass(frozen=True)
class Start:
    """The checkpoint from which a run resumes.

    Args:
        checkpoint: the file.
        step: its optimizer step.
        run: the folder of the checkpoint, if the run goes on there; None if it gets a new folder.
        settings: the settings in the checkpoint.
    """

    checkpoint: Path
    step: int
    run: Path | None = None
    settings: Settings = field(default_factory=dict, repr=False)

    @property
    def ended(self) -> bool:
        """True if the launch that saved the checkpoint was to end at its step, by --trainer.max_steps."""
        return self.settings.get("trainer.max_steps") == self.step


class Resumable(Protocol):
    """A LightningModule whose runs can be resumed, such as `uvit_decay.tasks.Task`."""

    net: nn.Module
    trainer: Trainer
    optim: Any  # with `schedule` and `cooldown`, see `uvit_decay.tasks.Optimization`
    settings: Settings  # all flags of the run; empty for a run of a script
    allowed: Sequence[str]  # settings that may differ from the checkpoint's
    start: Start | None  # the checkpoint from which the run resumes, if the program sets it

    @property
    def data(self) -> ImageData | Any:
        """The data module of the run, or what replaces it in a script with its own loaders."""

    def function_spec(self) -> Mapping[str, Any]:
        """Return the fields of the model card that define the trained function."""

    def group_parameters(self, lr: float) -> Sequence[Mapping[str, Any]]:
        """Return the optimizer's groups of all trained parameters."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the weights as checkpoints store them."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Load the weights of a checkpoint."""
