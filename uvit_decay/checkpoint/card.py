"""The model card: what a checkpoint records besides the weights, the same in every file that this project writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from uvit_decay.autoencoder import LatentSpace
from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.diffusion.prediction import Prediction, Weighting
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.runtime.errors import UserError, check_whole
from uvit_decay.runtime.instantiate import Spec, build
from uvit_decay.runtime.validation import is_plain, typed
from uvit_decay.sampling_options import Weights

KEY = "uvit_decay"  # key of the card in a .ckpt, and in the metadata of a .safetensors
VERSION = 1  # of the form of a card, to be raised when an older reader would misunderstand it


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """All that is needed besides the weights to use a network, to resume its training and to export it.

    Path, prediction and sampling are those of a denoiser; all three are None for an encoder or a classifier.

    Args:
        version: of the form of the card.
        net: class and arguments of the network.
        path: class and arguments of the noise path.
        prediction: quantity that the network predicts.
        sampling: default sampling.
        class_names: names of the real classes; empty if the network is unconditional or has no classifier.
        data: name of the training data.
        step: optimizer steps so far.
        latents: latent space of the data; None for pixels.
        weighting: weighting of the loss; None if it is not known, as for imported files.
        class_hash: sha256 of the class names of the data; None if it is not known.
        pieces: micro-batches into which the run divides a global batch.
        data_hash: fingerprint of the training data, which is that of the same list of images in any folder; None if it
            is not known.
        weights: set of weights in an exported file; None for a .ckpt, which may have both.

    Raises:
        UserError: a number out of range, or a part of a denoiser without the others.
    """

    version: int = VERSION
    net: Spec
    path: Spec | None = None
    prediction: Prediction | None = None
    sampling: Sampling | None = None
    class_names: tuple[str, ...]
    data: str
    step: int
    latents: LatentSpace | None = None
    weighting: Weighting | None = None
    class_hash: str | None = None
    pieces: int = 1
    data_hash: str | None = None
    weights: Weights | None = None

    def __post_init__(self) -> None:
        if self.version > VERSION:
            raise UserError(
                f"its model card has version {self.version}, known are those up to {VERSION}: update uvit_decay"
            )
        check_whole(0, 2**63 - 1, step=self.step)
        check_whole(1, 2**48, pieces=self.pieces)
        absent = [name for name in ("path", "prediction", "sampling") if getattr(self, name) is None]
        if len(absent) in (1, 2):
            raise UserError(f"its model card lacks {absent[0]}, a denoiser has path, prediction and sampling")

    @classmethod
    def from_dict(cls, values: Any, where: Path | str) -> ModelCard:
        """Return the card with these values, read from the file `where`; entries that are no fields are ignored.

        Older cards have no version, and mean the same as those of version 1.

        Raises:
            UserError: a newer version, values that are not plain, or fields that are missing or of the wrong type.
        """
        known = {field.name for field in fields(cls)}
        try:
            if not is_plain(values):
                raise UserError("its model card holds more than names and plain values, or has no end")
            values = typed(dict[str, object], values, "its model card")
            if str(values.get("weights")).startswith("ema:"):  # one of several averages, which older versions kept
                values = {**values, "weights": "ema"}
            return typed(cls, {name: value for name, value in values.items() if name in known}, "its model card")
        except UserError as error:
            raise UserError(f"{where} is damaged, or of another version of this project: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values that a checkpoint stores; fields that are None are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def noise_path(self, trusted: Sequence[str] = ()) -> NoisePath | None:
        """Return the noise path, which must be one of this package or `trusted`; None if there is no denoiser."""
        return self.path and build(self.path, NoisePath, NoisePath.__module__, trusted)


def average(state: object, where: object) -> dict[str, Tensor]:
    """Return the average in a state of the callback `EMA`, from the file `where`; it is empty if there was none."""
    state = typed(dict[str, object], state, f"EMA of {where}")
    return typed(dict[str, Tensor], state.get("shadow", {}), f"EMA weights of {where}")
