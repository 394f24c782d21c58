"""Images from a network: image i is a function of (seed, i) and its label alone, whatever the batch size.

Notation as in path.py; b = batch, c = channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from uvit_decay.diffusion.guidance import Guided
from uvit_decay.diffusion.loss import Network, Prediction
from uvit_decay.diffusion.path import Path
from uvit_decay.diffusion.sampler import SAMPLERS, Denoiser
from uvit_decay.errors import UserError
from uvit_decay.randomness import generator


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Args:
        sampler: a name in `uvit_decay.diffusion.sampler.SAMPLERS`.
        steps: steps of the sampler, 1 to 1000; Heun calls the network 2 steps - 1 times, the others once a step.
        guidance: scale w of uncond + w (cond - uncond), at least 0; 1 is none.
        clip: clamp the denoised image to [-1, 1] at every step; null means for pixels, but not for latents.

    Raises:
        UserError: unknown sampler, or a number out of range.
    """

    sampler: str = "dpm++"
    steps: int = 25
    guidance: float = 1.0
    clip: bool | None = None

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise UserError(f"unknown sampler {self.sampler!r}: one of {', '.join(SAMPLERS)}")
        if not 1 <= self.steps <= 1000:
            raise UserError(f"steps must lie between 1 and 1000, got {self.steps}")
        if not 0.0 <= self.guidance < float("inf"):
            raise UserError(f"guidance must be a number of at least 0 (1 is none), got {self.guidance}")

    @property
    def evaluations(self) -> int:
        """Network evaluations for each image; with guidance each of them is of both halves."""
        return SAMPLERS[self.sampler].evaluations(self.steps)

    def describe(self) -> str:
        """Short name for keys and files, such as `dpm++25_w2`."""
        return f"{self.sampler}{self.steps}_w{self.guidance:g}"


def denoiser(net: Network, path: Path, prediction: Prediction, y: Tensor | None, clip: bool) -> Denoiser:
    """(x_t, t) -> (x, eps) from what the network predicts; with `clip`, x is in [-1, 1] and eps agrees with it."""

    def denoise(x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        out = net(x_t, t, y).to(x_t)
        if prediction == "eps" and not clip:
            return path.data_from_noise(x_t, out, t), out
        x = path.data_from_noise(x_t, out, t) if prediction == "eps" else out
        x = x.clamp(-1, 1) if clip else x
        return x, path.noise_from_data(x_t, x, t)

    return denoise


@dataclass(frozen=True)
class Source:
    """A trained network with all that sampling needs: its path, its prediction, and the shape (c, h, w) of an image.

    `num_classes` 0 means unconditional; `null_label` says whether it knows "no label" (= num_classes); `pixels` is
    false for latents.
    """

    net: Network
    path: Path
    prediction: Prediction
    shape: tuple[int, int, int]
    num_classes: int
    null_label: bool
    device: torch.device
    pixels: bool = True

    @classmethod
    def of(cls, net: Any, path: Path, prediction: Prediction, device: torch.device, pixels: bool = True) -> Source:
        """From a network that says what it was made for: `image_size`, `channels`, `num_classes`, `null_label`."""
        shape = (net.channels, net.image_size, net.image_size)
        return cls(net, path, prediction, shape, net.num_classes, net.null_label, device, pixels)

    def check(self, sampling: Sampling) -> None:
        """Raise a UserError where the network cannot do what `sampling` asks."""
        if sampling.guidance == 1.0:
            return
        if not self.num_classes:
            raise UserError("guidance needs a class-conditional checkpoint, this one is unconditional: use guidance 1")
        if not self.null_label:
            raise UserError("guidance needs a network that was trained with a null label, this one was not")

    def unguided(self, sampling: Sampling) -> Sampling:
        """`sampling`, without the guidance that an unconditional network cannot use."""
        return sampling if self.num_classes and self.null_label else replace(sampling, guidance=1.0)


def share(count: int, rank: int, ranks: int) -> range:
    """The contiguous part of `count` things that falls to one of several processes; in rank order they are all."""
    return range(rank * count // ranks, (rank + 1) * count // ranks)


def generate(
    source: Source, sampling: Sampling, indices: Sequence[int], labels: Sequence[int] | None, seed: int, batch_size: int
) -> Iterator[Tensor]:
    """Float32 batches (b, c, h, w), about [-1, 1], of the images with these `indices`, in order.

    Args:
        source: the network; it should be in eval mode and hold the weights to sample with.
        sampling: sampler, steps, guidance.
        indices: which images of this seed.
        labels: an int for each index, num_classes is the null label; None for an unconditional network.
        seed: the seed.
        batch_size: images at a time.
    """
    source.check(sampling)
    for start in range(0, len(indices), batch_size):
        part = slice(start, start + batch_size)
        yield _generate_batch(source, sampling, indices[part], None if labels is None else labels[part], seed)


@torch.no_grad()
def _generate_batch(
    source: Source, sampling: Sampling, indices: Sequence[int], labels: Sequence[int] | None, seed: int
) -> Tensor:
    generators = [generator("sample", seed, i) for i in indices]
    x = torch.stack([torch.randn(source.shape, generator=g) for g in generators]).to(source.device)
    y = None if labels is None else torch.tensor(labels, dtype=torch.int64, device=source.device)
    net = Guided(source.net, sampling.guidance, source.num_classes)
    clip = source.pixels if sampling.clip is None else sampling.clip
    denoise = denoiser(net, source.path, source.prediction, y, clip)
    for _, state in SAMPLERS[sampling.sampler].run(denoise, source.path, x, sampling.steps, generators):
        x = state
    return x
