"""Images from a network: image i is a function of (seed, i) and its label alone, whatever the batch size.

Notation as in path.py; b = batch, c = channels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from uvit_decay.diffusion.flow import Denoiser, Flow, sampling_interval
from uvit_decay.diffusion.guidance import Guided
from uvit_decay.diffusion.loss import Network, Prediction
from uvit_decay.diffusion.path import Path
from uvit_decay.diffusion.sampler import SAMPLERS, Sampler, of_sde
from uvit_decay.diffusion.sde import SDE, short
from uvit_decay.errors import UserError
from uvit_decay.precision import Precision, chosen_precision, computing
from uvit_decay.randomness import normal

ADAPTIVE = 100  # evaluations that an adaptive sampler is taken to need, for estimates of the cost


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Args:
        sampler: a name in `uvit_decay.diffusion.sampler.SAMPLERS`.
        steps: steps of the sampler, 1 to 1000; null means its own number, such as 25 for dpm++. Most call the network
            once a step, Heun's method twice, and dopri5 as often as it needs whatever the steps.
        guidance: scale w of uncond + w (cond - uncond), 0 to a million; 1 is none.
        clip: clamp the denoised image to [-1, 1] at every step; null means for pixels, but not for latents, nor with a
            sampler that is named after a paper.
        guidance_channels: guide the first so many channels only; null means all. SiT's code guides 3 of 4.
        guidance_interval: guide at these times only, 0 is data and 1 is noise; null means at all.
        sde: what is integrated, for the samplers of an SDE; null means the sampler's own choice.
        precision: of the network: float32, tf32 or bf16; null means tf32 on CUDA GPUs, float32 elsewhere. The sampler
            itself is in float32.

    Raises:
        UserError: unknown sampler, or a number out of range.
    """

    sampler: str = "dpm++"
    steps: int | None = None
    guidance: float = 1.0
    clip: bool | None = None
    guidance_channels: int | None = None
    guidance_interval: tuple[float, float] | None = None
    sde: SDE | None = None
    precision: Precision | None = None

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise UserError(f"unknown sampler {self.sampler!r}: one of {', '.join(SAMPLERS)}")
        if self.steps is not None and not 1 <= self.steps <= 1000:
            raise UserError(f"steps must lie between 1 and 1000, got {self.steps}")
        if not 0.0 <= self.guidance <= 1e6:
            raise UserError(f"guidance must be a number from 0 to a million (1 is none), got {self.guidance}")
        if self.guidance_channels is not None and self.guidance_channels < 1:
            raise UserError(f"guidance_channels must be at least 1, got {self.guidance_channels}")
        if self.guidance_interval and not 0 <= self.guidance_interval[0] < self.guidance_interval[1] <= 1:
            raise UserError(f"guidance_interval must be two times from 0 to 1, got {self.guidance_interval}")
        if self.sde and not SAMPLERS[self.sampler].sde:
            names = ", ".join(name for name, sampler in SAMPLERS.items() if sampler.sde)
            raise UserError(f"sampler {self.sampler} integrates no sde: remove it, or use one of {names}")

    @property
    def method(self) -> Sampler:
        """The sampler, with the chosen SDE."""
        named = SAMPLERS[self.sampler]
        return of_sde(self.sde, named.steps, named.paper) if self.sde else named

    @property
    def step_count(self) -> int:
        """`steps`, or the sampler's own number."""
        return self.steps or self.method.steps

    @property
    def evaluations(self) -> int | None:
        """Network evaluations for each image, with guidance of both halves; None where the images decide: `Counted`."""
        return self.method.evaluations(self.step_count)

    def at_once(self, batch_size: int) -> int:
        """How many images of a batch the network is asked for at once."""
        return 1 if self.method.alone else batch_size

    def values(self) -> dict[str, Any]:
        """Plain values for reports: the fields, with the number of steps, and the network evaluations."""
        return {**asdict(self), "steps": self.step_count, "evaluations": self.evaluations}

    def describe(self) -> str:
        """Short name for keys and files, such as `dpm++25_w2`; another one for all that makes other images."""
        parts = [
            self.sampler if self.evaluations is None else f"{self.sampler}{self.step_count}",
            f"w{short(self.guidance)}",
        ]
        if self.clip or (self.clip is False and not self.method.paper):
            parts.append("clip" if self.clip else "noclip")
        if self.guidance_channels is not None:
            parts.append(f"first{self.guidance_channels}")
        if self.guidance_interval:
            parts.append("t{}-{}".format(*map(short, self.guidance_interval)))
        if self.sde:
            parts.append(self.sde.describe())
        if self.precision not in (None, "float32"):
            parts.append(self.precision)
        return "_".join(parts)


class Counted:
    """The same call as the network; `evaluations` counts the images that it was asked for, in guidance both halves."""

    def __init__(self, net: Network) -> None:
        self.net, self.evaluations = net, 0

    def __call__(self, x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        self.evaluations += len(x)
        return self.net(x, t, y)


def _split(path: Path, prediction: Prediction, x_t: Tensor, out: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """(x, eps) from what the network says of x_t."""
    if prediction == "velocity":
        return path.split(x_t, out, t)
    if prediction == "x":
        return out, path.noise_from_data(x_t, out, t)
    eps = path.noise_from_score(out, t) if prediction == "score" else out
    return path.data_from_noise(x_t, eps, t), eps


def denoiser(net: Network, path: Path, prediction: Prediction, y: Tensor | None, clip: bool) -> Denoiser:
    """(x_t, t) -> (x, eps) from what the network predicts; with `clip`, x is in [-1, 1] and eps agrees with it."""

    def denoise(x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        x, eps = _split(path, prediction, x_t, net(x_t, t, y).to(x_t), t)
        if not clip:
            return x, eps
        x = x.clamp(-1, 1)
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
        sampling.method.check(self.path)
        if sampling.guidance == 1.0:
            return
        if not self.num_classes:
            raise UserError("guidance needs a class-conditional checkpoint, this one is unconditional: use guidance 1")
        if not self.null_label:
            raise UserError("guidance needs a network that was trained with a null label, this one was not")
        if (sampling.guidance_channels or 1) > self.shape[0]:
            raise UserError(
                f"guidance_channels {sampling.guidance_channels}: this network has {self.shape[0]} channels"
            )

    def flow(self, sampling: Sampling, labels: Sequence[int] | None) -> Flow:
        """What is integrated, for a batch with these labels."""
        y = None if labels is None else torch.tensor(labels, dtype=torch.int64, device=self.device)
        net = Guided(self.net, sampling.guidance, self.num_classes, sampling.guidance_channels)
        clip = self.clips(sampling)
        guided, plain = (denoiser(either, self.path, self.prediction, y, clip) for either in (net, self.net))
        flow = Flow(guided, self.path, *sampling_interval(self.path, self.prediction, clip))
        if sampling.guidance == 1.0 or sampling.guidance_interval is None:
            return flow
        return replace(flow, plain=plain, guided=sampling.guidance_interval)

    def clips(self, sampling: Sampling) -> bool:
        """Whether the denoised image is clipped at every step."""
        return self.pixels and not sampling.method.paper if sampling.clip is None else sampling.clip

    def unguided(self, sampling: Sampling) -> Sampling:
        """`sampling`, without the guidance that an unconditional network cannot use."""
        return sampling if self.num_classes and self.null_label else replace(sampling, guidance=1.0)

    def in_precision(self, sampling: Sampling) -> Sampling:
        """`sampling`, with the precision of this device if none is named. Raises UserError: tf32 on a CPU."""
        return replace(sampling, precision=chosen_precision(sampling.precision, self.device))


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


def pictures(
    source: Source,
    sampling: Sampling,
    indices: Sequence[int],
    labels: Sequence[int] | None,
    seed: int,
    finish: Callable[[Tensor], Tensor],
) -> Tensor:
    """Uint8 (b, c, h, w): what `finish`, which may be an autoencoder, makes of one batch of `generate`.

    An autoencoder computes in float32 where the network does, else in TF32 where there is one, never in bfloat16.
    """
    full = chosen_precision(sampling.precision, source.device) == "float32"
    with computing(source.device, "float32" if full else "tf32"):
        made = generate(source, sampling, indices, labels, seed, len(indices))
        return torch.cat([finish(batch) for batch in made])


@torch.no_grad()
def _generate_batch(
    source: Source, sampling: Sampling, indices: Sequence[int], labels: Sequence[int] | None, seed: int
) -> Tensor:
    if sampling.method.alone and len(indices) > 1:
        lone = [[label] for label in labels] if labels is not None else [None] * len(indices)
        return torch.cat([_generate_batch(source, sampling, [i], y, seed) for i, y in zip(indices, lone, strict=True)])
    rows = torch.tensor(indices, dtype=torch.int64).to(source.device)
    x = normal("sample", seed, rows=rows, shape=source.shape)

    def noise(step: int) -> Tensor:
        return normal("sample step", seed, step, rows=rows, shape=source.shape)

    flow = source.flow(sampling, labels)
    with computing(source.device, chosen_precision(sampling.precision, source.device)):
        for _, state in sampling.method.run(flow, x, sampling.step_count, noise):
            x = state
    return x


@torch.no_grad()
def estimated_seconds(source: Source, evaluations: int, batch_size: int, precision: Precision | None = None) -> float:
    """About how long evaluations of so many images take in such batches; finding out takes at most 2 % of it."""
    batch = max(1, min(batch_size, evaluations // 100))
    x = torch.zeros(batch, *source.shape, device=source.device)
    t = torch.full((batch,), 0.5, device=source.device)
    y = torch.zeros(batch, dtype=torch.int64, device=source.device) if source.num_classes else None
    with computing(source.device, chosen_precision(precision, source.device)):
        source.net(x, t, y).sum().item()  # a warm-up
        start = time.perf_counter()
        source.net(x, t, y).sum().item()
    return evaluations * (time.perf_counter() - start) / batch


def image_evaluations(count: int, sampling: Sampling) -> int:
    """Evaluations of single images that `count` samples take: guidance evaluates two for each."""
    return count * (sampling.evaluations or ADAPTIVE) * (1 if sampling.guidance == 1.0 else 2)
