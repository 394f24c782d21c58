"""Data that must fit the network: data modules, and loaders passed to `Trainer.fit` by a plain Lightning script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from uvit_decay.data.batches import Batch
from uvit_decay.data.datamodule import ImageData
from uvit_decay.pictures import to_float, to_uint8
from uvit_decay.terminal.errors import UserError

MOST = 2.0  # of images without negative values: [0, 1], and a margin for those that were resized
WANTED = "pass a DataLoader of (images, labels), or a data module of uvit_decay.data"


class LoaderData:
    """Substitute for a data module in `Trainer.fit(task, DataLoader(...))`.

    The loader yields (images, labels), or only images for a network without labels. Images are float (b, c, h, w) in
    about [-1, 1], or uint8; labels are integers (b,) from 0. Noise and times follow the step and the position in the
    global batch, as for a data module. The loader decides the order of the images: a run that is resumed within an
    epoch begins this epoch again.

    Args:
        trainer: the trainer of the run.
        net: the network, whose image size, channels and classes the batches must have.
    """

    name = "dataloader"
    fingerprint = None  # the images are not known
    latents = None
    test = None

    def __init__(self, trainer: Trainer, net: nn.Module) -> None:
        self.trainer = trainer
        self.net = net
        self.class_names = tuple(map(str, range(net.num_classes)))
        self._lengths: dict[bool, int] = {}  # images of the first batch of training (True) and of validation

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a global batch on each device."""
        return self.trainer.accumulate_grad_batches

    @property
    def batch_size(self) -> int:
        """Global batch size, over all devices; raises a UserError if the training loader does not tell it."""
        self._set_up_loader()
        loader = self.trainer.train_dataloader
        size = getattr(loader, "batch_size", None)
        if not size:
            sampler = getattr(loader, "batch_sampler", None)
            size = getattr(sampler, "batch_size", None)
        if not isinstance(size, int):
            raise UserError(f"a {type(loader).__name__} does not tell its batch_size: {WANTED}")
        return size * self.trainer.world_size * self.micro_batches

    def run_length(self) -> tuple[float, float]:
        """Return the optimizer steps of an epoch and of the whole run; both may be infinite."""
        self._set_up_loader()
        total = self.trainer.estimated_stepping_batches
        if total < 0:  # Lightning's -1: the loader does not tell its length, and only epochs are limited
            total = math.inf
        epoch = self.trainer.num_training_batches / self.micro_batches
        if not math.isinf(epoch):
            epoch = math.ceil(epoch)
        return epoch, total

    def _set_up_loader(self) -> None:
        """Let the trainer set up its loader, which it does only after the optimizer."""
        if self.trainer.train_dataloader is None:
            self.trainer.fit_loop.setup_data()

    def preview(self, x: Tensor) -> Tensor:
        """Convert images in the scale of networks to images for display: uint8 (b, c, h, w)."""
        return to_uint8(x)

    def batch(self, given: Any, index: int, trains: bool) -> Batch:
        """Return a batch of the loader, already on the device, in the form that tasks take.

        Args:
            given: the batch as the loader yields it.
            index: number of the batch in its epoch.
            trains: whether it is a batch of training.
        """
        images, labels = self._split(given)
        images = to_float(images) if images.dtype == torch.uint8 else images.float()
        if trains not in self._lengths:
            self._check(images, labels)
            self._lengths[trains] = len(images)
        length = self._lengths[trains]
        parts = 1
        number = index
        if trains:
            parts = self.micro_batches
            number = self.trainer.global_step
        first = (self.trainer.global_rank * parts + index % parts) * length
        return Batch(images, labels, number, first, length * parts * self.trainer.world_size)

    def _split(self, given: Any) -> tuple[Tensor, Tensor]:
        """Return images and int64 labels of a batch; labels are 0 if the network takes no labels."""
        parts = list(given) if isinstance(given, Sequence) else [given]
        if len(parts) == 1 and not self.net.num_classes and isinstance(parts[0], Tensor):
            parts.append(torch.zeros(len(parts[0]), dtype=torch.int64, device=parts[0].device))
        if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise UserError(f"the loader yields batches of {len(parts)} parts ({kinds:.80}): {WANTED}")
        images, labels = parts
        return images, labels.long()

    def _check(self, images: Tensor, labels: Tensor) -> None:
        """Raise a UserError if scale or labels do not fit the network; warn about images in [0, 1]."""
        classes = self.net.num_classes
        if classes and not bool(((labels >= 0) & (labels < classes)).all()):
            found = f"{int(labels.min())} to {int(labels.max())}"
            raise UserError(f"the loader yields labels {found}, the network has num_classes {classes}")
        if bool((images >= 0).all()):
            if images.max() > MOST:
                found = f"{images.min():g} to {images.max():g}"
                raise UserError(f"the loader yields floats from {found}: give uint8, or floats in about [-1, 1]")
            rank_zero_info("warning: the images of the loader hold no negative values; the networks take [-1, 1]")


def check_match(net: nn.Module, data: ImageData) -> None:
    """Raise a UserError if image size, channels or number of classes of the data are not the network's."""
    required = {"image_size": data.image_size, "channels": data.channels}
    if net.num_classes:
        required["num_classes"] = len(data.class_names)
    of_data, of_net, flags = [], [], []
    for name, value in required.items():
        ours = getattr(net, name)
        if ours != value:
            of_data.append(f"{name} {value}")
            of_net.append(str(ours))
            # The flag of the network comes first: images of another size or in grey are rarely what is wanted.
            flag = f"`model.net.{name}` {value}"
            if name in data.adjustable:
                flag += f" (or `data.{name}` {ours})"
            flags.append(flag)
    if flags:
        raise UserError(
            f"the data have {', '.join(of_data)}, the network has {', '.join(of_net)}: set {' '.join(flags)}"
        )
