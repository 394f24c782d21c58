"""Images sampled from a checkpoint, addressed by index."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from uvit_decay import checkpoint
from uvit_decay.autoencoder import decoder
from uvit_decay.checkpoint import Checkpoint
from uvit_decay.diffusion.nfe import NFECounter, estimated_seconds, total_nfe
from uvit_decay.diffusion.sampling import DiffusionModel, Sampling, generate_uint8
from uvit_decay.image_io import to_uint8
from uvit_decay.runtime.distributed import cpu_threads
from uvit_decay.runtime.errors import UserError, one_line
from uvit_decay.runtime.random import uniform
from uvit_decay.sampling_options import check_numbers, choose_classes, chosen_sampling

TINY = 5_000_000  # parameters


@dataclass(frozen=True)
class Samples:
    """An unbounded sequence of samples; sample i depends only on (checkpoint, seed, i, label of i).

    Args:
        ckpt: path of the checkpoint.
        found: contents of the checkpoint.
        source: its network on the sampling device, with a counter of network evaluations.
        sampling: sampler and its settings.
        classes: classes of the images; empty for an unconditional network.
        at_random: whether classes are drawn at random, rather than taken in turn.
        seed: seed of noise and random labels.
        shape: (c, h, w) of an image.
        decode: function from the float samples of the network to uint8 images.
        vae: hub id or folder of the autoencoder that decodes latents; None for pixels.
    """

    ckpt: Path
    found: Checkpoint
    source: DiffusionModel
    sampling: Sampling
    classes: list[int]
    at_random: bool
    seed: int
    shape: tuple[int, int, int]
    decode: Callable[[Tensor], Tensor]
    vae: str | None = None

    @classmethod
    def from_options(cls, ckpt: Path, options: argparse.Namespace, local_rank: int = 0) -> Samples:
        """Load a checkpoint and apply the options of `add_sampling_options`.

        Args:
            ckpt: path of the checkpoint.
            options: parsed options.
            local_rank: number of the GPU to use unless the options name a device.

        Raises:
            UserError: the checkpoint cannot be read, or does not support the options.
        """
        check_numbers(options)
        found = checkpoint.load(ckpt, options.weights, options.trust)
        source = found.source(pick_device(options.device, local_rank))
        sampling = replace(source.unguided(found.sampling), **chosen_sampling(options, found.sampling.sampler))
        source.check(sampling)
        sampling = source.in_precision(sampling)
        classes = choose_classes(options, source.num_classes)
        at_random = sampling.method.paper if options.labels is None else options.labels == "random"
        if options.vae is not None and not found.latents:
            raise UserError("--vae: this checkpoint makes pixels, there is nothing to decode")
        counted = replace(source, net=NFECounter(source.net))
        made = cls(ckpt, found, counted, sampling, classes, at_random, options.seed, source.shape, to_uint8)
        if not found.latents:
            return made
        autoencoder = decoder(found.latents, options.vae, source.device)
        shape = (3, *(side * autoencoder.space.factor for side in source.shape[1:]))
        return replace(made, shape=shape, decode=autoencoder.decode, vae=autoencoder.space.vae)

    def images(self, indices: Sequence[int]) -> Tensor:
        """Return the samples with these indices, in one batch: uint8 (b, c, h, w) on the sampling device."""
        with self._threads():
            return generate_uint8(self.source, self.sampling, indices, self.labels(indices), self.seed, self.decode)

    def labels(self, indices: Sequence[int]) -> list[int] | None:
        """Return the classes of samples i, functions of (seed, i) alone; None for an unconditional network."""
        if not self.classes:
            return None
        places = torch.tensor(indices, dtype=torch.int64, device="cpu")
        if self.at_random:
            places = (uniform("label", self.seed, rows=places).double() * len(self.classes)).long()
        return [self.classes[place] for place in (places % len(self.classes)).tolist()]

    @property
    def nfe(self) -> int:
        """Network evaluations of this process so far, per image; a guided step counts twice."""
        return self.source.net.nfe

    def seconds(self, count: int, batch_size: int) -> float:
        """Return the estimated time of one process for `count` images, in seconds."""
        evaluations = total_nfe(count, self.sampling)
        with self._threads():
            uncounted = replace(self.source, net=self.found.net)
            batch = self.sampling.at_once(min(count, batch_size))
            return estimated_seconds(uncounted, evaluations, batch, self.sampling.precision)

    def describe(self) -> dict[str, Any]:
        """Return the metadata of these samples as plain values."""
        return {
            "checkpoint": str(self.ckpt),
            "step": self.found.step,
            "data": self.found.data,
            "weights": self.found.weights,
            **self.sampling.metadata(),
            "clip": self.source.clips(self.sampling),
            "seed": self.seed,
            "labels": labels_in_words(self.classes, self.source.num_classes, self.at_random),
            "vae": self.vae,
        }

    def name(self) -> str:
        """Return a short name for keys and file names, such as `ema_dpm++25_w2_seed0`."""
        parts = [self.found.weights, self.sampling.name, f"seed{self.seed}"]
        if self.classes and self.at_random:
            parts.append("random-labels")
        if self.classes != list(range(self.source.num_classes)):
            listed = "-".join(map(str, self.classes))
            few = len(self.classes) <= 10
            parts.append(f"classes{listed}" if few else f"{len(self.classes)}classes-{crc32(listed.encode()):08x}")
        if self.vae and self.vae != self.found.latents["vae"]:
            parts.append(f"vae-{Path(self.vae).name}")
        return "_".join(parts)

    def _threads(self) -> AbstractContextManager[None]:
        """Limit tiny networks to one CPU thread; more are up to 3 times slower on a busy machine."""
        tiny = self.source.device.type == "cpu" and not self.found.latents
        return cpu_threads(1 if tiny and sum(p.numel() for p in self.found.net.parameters()) < TINY else None)


def labels_in_words(classes: Sequence[int], num_classes: int, at_random: bool) -> str | None:
    """Return a phrase such as "all 10 classes in turn"; None for an unconditional network."""
    if not classes:
        return None
    every = list(classes) == list(range(num_classes))
    shown = f"all {num_classes} classes" if every else f"classes {','.join(map(str, classes))}"
    return f"{shown} {'at random' if at_random else 'in turn'}"


def pick_device(name: str | None, local_rank: int) -> torch.device:
    """Return the device `name`, else the GPU of this process, else the CPU; raise a UserError if it does not work."""
    if name is None:
        name = f"{torch.accelerator.current_accelerator()}:{local_rank}" if torch.accelerator.is_available() else "cpu"
    try:
        tried = torch.zeros(1, device=name)
        tried.item()  # fails on the meta device
        return tried.device
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(f"--device {name}: {one_line(error)}") from error
