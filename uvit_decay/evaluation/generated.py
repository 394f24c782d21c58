"""Images that a network generates during evaluation, without being written to disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from uvit_decay.evaluation.image_sources import ImageSource, as_channels, file_state
from uvit_decay.runtime.errors import UserError
from uvit_decay.samples import Samples


class GeneratedImages(ImageSource):
    """Samples 0 to num - 1, as they are when they are read.

    Args:
        samples: the sequence of samples.
        num: number of samples.
        channels: 3 converts grey images to RGB.
    """

    prefetch = False  # the network and the extractor share a device

    def __init__(self, samples: Samples, num: int, channels: int) -> None:
        nfe = samples.sampling.nfe
        self.name = samples.name if nfe is None else f"{samples.name}_nfe{nfe}"
        if samples.checkpoint is not None:
            self.name = f"{samples.file.stem}-step{samples.checkpoint.card.step}_{self.name}"
            self.class_names = samples.checkpoint.card.class_names
        if samples.shape[0] not in (1, channels):
            raise UserError(f"{self.name} has {samples.shape[0]} channels, these features are of {channels}")
        self.samples, self.num = samples, num
        # Once, since a running training may replace the file meanwhile; a network in training has none.
        self._file = {} if samples.file is None else file_state("checkpoint", samples.file)
        self.shape = (channels, *samples.shape[1:])
        labels = samples.labels(range(num))
        self.labels = None if labels is None else torch.tensor(labels)

    def __len__(self) -> int:
        return self.num

    def read(self, indices: Sequence[int]) -> Tensor:
        return as_channels(self.samples.images(indices), self.shape[0])

    @property
    def nfe(self) -> int:
        return self.samples.nfe

    def fingerprint(self) -> dict[str, Any]:
        return {**self._file, "sampled": self.samples.metadata()}

    def content(self) -> list[Any]:
        about = self.samples.metadata()
        about.pop("checkpoint", None)  # its path; `Processes.check_file` compares the file
        return [len(self), self.shape, about]

    def metadata(self) -> dict[str, Any]:
        return {**super().metadata(), **self.samples.metadata()}
