"""Images sampled from a checkpoint during evaluation, without being written to disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uvit_decay.evaluation.image_sources import ImageSource, as_channels
from uvit_decay.runtime.errors import UserError
from uvit_decay.samples import Samples


class CheckpointImages(ImageSource):
    """Samples 0 to num - 1 of a checkpoint.

    Args:
        path: file of the checkpoint.
        sampled: sequence of its samples.
        num: number of samples.
        channels: 3 converts grey images to RGB.

    Raises:
        UserError: the checkpoint generates images of other channels.
    """

    prefetch = False  # the network and the extractor share a device

    def __init__(self, path: Path, sampled: Samples, num: int, channels: int) -> None:
        own = sampled.shape[0]
        if own not in (1, channels):
            raise UserError(f"{path} makes images of {own} channels, these features are of {channels}")
        self.path, self.sampled, self.num = path, sampled, num
        self.shape = (channels, *sampled.shape[1:])
        evaluations = sampled.sampling.nfe
        cost = "" if evaluations is None else f"_nfe{evaluations}"
        self.name = f"{path.stem}-step{sampled.found.step}_{sampled.name()}{cost}"
        labels = sampled.labels(range(num))
        if labels is not None:
            self.labels = torch.tensor(labels)
            self.class_names = sampled.found.class_names or tuple(map(str, range(sampled.source.num_classes)))

    def __len__(self) -> int:
        return self.num

    def read(self, indices: Sequence[int]) -> Tensor:
        return as_channels(self.sampled.images(indices), self.shape[0])

    @property
    def nfe(self) -> int:
        return self.sampled.nfe

    def fingerprint(self) -> dict[str, Any]:
        stat = self.path.stat()
        return {
            "checkpoint": str(self.path.resolve()),
            "size": stat.st_size,
            "time": stat.st_mtime_ns,
            "sampled": self.sampled.describe(),
        }

    def metadata(self) -> dict[str, Any]:
        return {**super().metadata(), **self.sampled.describe()}
