"""The guide of autoguidance: a worse network for the same images and labels, loaded from its own checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uvit_decay.checkpoint import Checkpoint, ModelCard, load
from uvit_decay.checkpoint.io import weights_file
from uvit_decay.generation.options import SamplingOptions
from uvit_decay.terminal.errors import UserError


@dataclass(frozen=True)
class Guide:
    """A network that guides another one.

    Args:
        checkpoint: contents of its checkpoint.
        file: path of its weights.
    """

    checkpoint: Checkpoint
    file: Path

    @classmethod
    def from_options(cls, ckpt: Path, options: SamplingOptions) -> Guide | None:
        """Load the guide that the options name for the network in `ckpt`; return None if they name no guide."""
        path = options.guide_file(ckpt)
        if path is None:
            return None
        checkpoint = load(path, options.weights, options.trust)
        try:
            checkpoint.check_denoiser()
        except UserError as error:
            raise UserError(f"the guide {path}: {error}") from error
        return cls(checkpoint, weights_file(path))

    def check(self, guided: ModelCard) -> None:
        """Raise a UserError unless this network has the class names and the latent space of the `guided` one.

        `DiffusionModel.check` has compared the number of classes, and pixels with latents.
        """
        ours = self.checkpoint.card
        if ours.class_names != guided.class_names:
            raise UserError(
                f"the guide {self.file} has other classes than `ckpt`, or another order: choose another one"
            )
        if guided.latents is not None:
            guided.latents.check_same(ours.latents, "`ckpt`", f"the guide {self.file}")

    def name(self, weights: str) -> str:
        """Return a short name for keys and files, such as `guide-last-step500`.

        Args:
            weights: weights of the guided network, ema or raw; the name contains the guide's weights if they differ.
        """
        card = self.checkpoint.card
        other = "" if card.weights == weights else f"-{card.weights}"
        return f"guide-{self.file.stem}-step{card.step}{other}"

    def metadata(self) -> dict[str, Any]:
        """Return the path of the guide, its optimizer steps and its weights, as plain values."""
        card = self.checkpoint.card
        return {"guide": str(self.file), "guide_step": card.step, "guide_weights": card.weights}
