"""Sampling of images from a network; image i depends only on (seed, i) and its label, not on the batch size.

Notation as in noise_path.py; b = batch, c = channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from uvit_decay.diffusion.denoiser import Denoiser, Guided, autoguided, denoise_fn
from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.diffusion.prediction import Network, Prediction, sampling_interval
from uvit_decay.diffusion.samplers import SAMPLERS, Sampler, sde_sampler
from uvit_decay.diffusion.sde import SDE, short_number
from uvit_decay.runtime.errors import UserError, check_choice, check_numbers, check_whole
from uvit_decay.runtime.precision import Precision, chosen_precision, computing
from uvit_decay.runtime.random import indices_on, normal

ADAPTIVE = 100  # assumed network evaluations of an adaptive sampler


@dataclass(frozen=True)
class Sampling:
    """Options of sampling.

    Args:
        sampler: a name in `uvit_decay.diffusion.samplers.SAMPLERS`.
        steps: steps of the sampler, 1 to 1000; null means the sampler's default, such as 25 for dpm++. Most call the
            network once a step, Heun's method twice; dopri5 chooses its steps itself, for any number here.
        guidance: scale w of uncond + w (cond - uncond), 0 to a million; 1 is none.
        clip: clamp the denoised image to [-1, 1] at every step; null means for pixels, but not for latents, nor with a
            sampler that is named after a paper.
        guidance_channels: guide only this number of first channels; null means all. SiT's code guides 3 of 4.
        guidance_interval: guide at these times only, 0 is data and 1 is noise; null means at all times.
        sde: the SDE to integrate, for the samplers of an SDE; null means the sampler's default.
        precision: precision of the network: float32, tf32 or bf16; null means tf32 on CUDA GPUs, float32 elsewhere.
            The sampler itself computes in float32.
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
        check_choice(SAMPLERS, sampler=self.sampler)
        if self.steps is not None:
            check_whole(SAMPLERS[self.sampler].fewest, 1000, **{f"steps of {self.sampler}": self.steps})
        check_numbers("[0, 1000000]", guidance=self.guidance)
        if self.guidance_channels is not None:
            check_whole(1, guidance_channels=self.guidance_channels)
        if self.guidance_interval and not 0 <= self.guidance_interval[0] < self.guidance_interval[1] <= 1:
            raise UserError(
                f"guidance_interval must be LOW,HIGH with 0 <= LOW < HIGH <= 1, got {self.guidance_interval}"
            )
        if self.sde and not SAMPLERS[self.sampler].sde:
            raise UserError(f"sampler {self.sampler} integrates no sde: remove it, or use a sampler of one, as sit-sde")

    @property
    def method(self) -> Sampler:
        """The sampler, with the chosen SDE."""
        named = SAMPLERS[self.sampler]
        return sde_sampler(self.sde, named.steps, named.paper) if self.sde else named

    @property
    def num_steps(self) -> int:
        """`steps`, or the sampler's default."""
        return self.steps or self.method.steps

    @property
    def nfe(self) -> int | None:
        """Network evaluations (NFE) for each image, a guided one counted once; None if adaptive (see `NFECounter`)."""
        return self.method.nfe(self.num_steps)

    def at_once(self, batch_size: int) -> int:
        """Return the number of images of a batch that the network evaluates together."""
        return 1 if self.nfe is None else batch_size

    def changed(self, **given: Any) -> Sampling:
        """Return these options with the `given` ones; another sampler has its own steps, clipping and SDE."""
        another = given.get("sampler", self.sampler) != self.sampler
        own = {"steps": None, "clip": None, "sde": None} if another else {}
        return replace(self, **own | given)

    def metadata(self) -> dict[str, Any]:
        """Return plain values for reports: the fields, the actual number of steps and the network evaluations."""
        return {**asdict(self), "steps": self.num_steps, "nfe": self.nfe}

    @property
    def name(self) -> str:
        """A short name for keys and files, such as `dpm++25_w2`; it differs if the images can differ."""
        steps = "" if self.nfe is None else self.num_steps
        parts = [f"{self.sampler}{steps}", f"w{short_number(self.guidance)}"]
        if self.clip or (self.clip is False and not self.method.paper):
            parts.append("clip" if self.clip else "noclip")
        if self.guidance_channels is not None:
            parts.append(f"first{self.guidance_channels}")
        if self.guidance_interval:
            parts.append("t{}-{}".format(*map(short_number, self.guidance_interval)))
        if self.sde:
            parts.append(self.sde.name)
        if self.precision not in (None, "float32"):
            parts.append(self.precision)
        return "_".join(parts)


@dataclass(frozen=True)
class DiffusionModel:
    """A trained network with its noise path, its prediction type and the shape (c, h, w) of an image.

    `num_classes` is 0 for an unconditional network; `null_label` is true if the network was trained with the label
    "no label" (= num_classes); `pixels` is false for latents; `learned_variance` is true if the network returns twice
    the channels, the second half being v of `uvit_decay.diffusion.ode.dit_ddpm`.
    """

    net: Network
    path: NoisePath
    prediction: Prediction
    shape: tuple[int, int, int]
    num_classes: int
    null_label: bool
    device: torch.device
    pixels: bool = True
    learned_variance: bool = False
    guide: DiffusionModel | None = None  # a worse network for autoguidance, instead of the null label

    @classmethod
    def from_net(
        cls, net: Any, path: NoisePath, prediction: Prediction, device: torch.device, pixels: bool = True
    ) -> DiffusionModel:
        """Build from a network with the attributes `image_size`, `channels`, `num_classes` and `null_label`.

        `learned_variance` is an attribute of networks that have one.
        """
        shape = (net.channels, net.image_size, net.image_size)
        variance = getattr(net, "learned_variance", False)
        return cls(net, path, prediction, shape, net.num_classes, net.null_label, device, pixels, variance)

    def check(self, sampling: Sampling) -> None:
        """Raise a UserError if the network does not support the options of `sampling`."""
        sampling.method.check(self.path)
        if sampling.method.learned_variance and not self.learned_variance:
            raise UserError(f"sampler {sampling.sampler} needs a network with a learned variance, as DiT's: use ddpm")
        if self.guide is not None:
            self._check_guide(self.guide, sampling)
            return
        if sampling.guidance == 1.0:
            return
        if not self.num_classes:
            raise UserError("guidance needs a class-conditional checkpoint, this one is unconditional: use guidance 1")
        if not self.null_label:
            raise UserError("guidance needs a network that was trained with a null label, this one was not")
        if (sampling.guidance_channels or 1) > self.shape[0]:
            raise UserError(f"guidance_channels {sampling.guidance_channels}: this network has {self.shape[0]}")

    def _check_guide(self, guide: DiffusionModel, sampling: Sampling) -> None:
        """Raise a UserError unless the guide makes images of the same shape, classes and noise path."""
        for name in ("shape", "num_classes", "path", "pixels"):
            ours, theirs = getattr(self, name), getattr(guide, name)
            if ours != theirs:
                raise UserError(f"--guide has {name} {theirs}, --ckpt has {ours}: name a guide with the same {name}")
        if sampling.guidance_channels is not None:
            raise UserError("--guidance-channels is for guidance by the null label: leave it out with --guide")

    def denoiser(self, sampling: Sampling, labels: Sequence[int] | None) -> Denoiser:
        """Return the denoiser to integrate, guided if asked for, for a batch with these labels."""
        y = None if labels is None else indices_on(self.device, labels)
        if self.guide is not None and sampling.guidance != 1.0:
            return self._autoguided(sampling, y)
        net = Guided(self.net, sampling.guidance, self.num_classes, sampling.guidance_channels)
        clip = self.clips(sampling)
        guided, plain = (denoise_fn(network, self.path, self.prediction, y, clip) for network in (net, self.net))
        denoiser = Denoiser(guided, self.path, *sampling_interval(self.path, self.prediction, clip))
        if sampling.guidance == 1.0 or sampling.guidance_interval is None:
            return denoiser
        return replace(denoiser, plain=plain, guided=sampling.guidance_interval)

    def _autoguided(self, sampling: Sampling, y: Tensor | None) -> Denoiser:
        """Return the denoiser of this network and its guide, for times at which both can be evaluated."""
        clip = self.clips(sampling)
        good = denoise_fn(self.net, self.path, self.prediction, y, clip=False)
        bad = denoise_fn(self.guide.net, self.path, self.guide.prediction, y, clip=False)
        low, high = sampling_interval(self.path, self.prediction, clip)
        guide_low, guide_high = sampling_interval(self.path, self.guide.prediction, clip)
        fn = autoguided(good, bad, sampling.guidance, self.path, clip)
        denoiser = Denoiser(fn, self.path, max(low, guide_low), min(high, guide_high))
        if sampling.guidance_interval is None:
            return denoiser
        plain = denoise_fn(self.net, self.path, self.prediction, y, clip)
        return replace(denoiser, plain=plain, guided=sampling.guidance_interval)

    def clips(self, sampling: Sampling) -> bool:
        """Return whether the denoised image is clipped at every step."""
        return self.pixels and not sampling.method.paper if sampling.clip is None else sampling.clip

    def unguided(self, sampling: Sampling) -> Sampling:
        """Return `sampling`, without guidance if the network cannot be guided (no classes or no null label)."""
        return sampling if self.num_classes and self.null_label else replace(sampling, guidance=1.0)

    def in_precision(self, sampling: Sampling) -> Sampling:
        """Return `sampling` with the precision filled in: the device's default if none is given."""
        return replace(sampling, precision=chosen_precision(sampling.precision, self.device))


@torch.no_grad()
def generate(
    model: DiffusionModel, sampling: Sampling, indices: Sequence[int], labels: Sequence[int] | None, seed: int
) -> Tensor:
    """Return the images with these `indices` as a float32 batch (b, c, h, w) of about [-1, 1].

    Args:
        model: the network, in eval mode, with the weights to sample with.
        sampling: sampler, steps, guidance.
        indices: indices of the images within the sequence of this seed.
        labels: an int for each index, num_classes is the null label; None for an unconditional network.
        seed: the seed.
    """
    model.check(sampling)
    if sampling.nfe is None and len(indices) > 1:
        each = [None] * len(indices) if labels is None else [[label] for label in labels]
        return torch.cat([generate(model, sampling, [i], y, seed) for i, y in zip(indices, each, strict=True)])
    rows = indices_on(model.device, indices)

    def draw(name: str, *step: int) -> Tensor:
        return normal(name, seed, *step, rows=rows, shape=model.shape)

    with computing(model.device, chosen_precision(sampling.precision, model.device)):
        for state in trajectory(model, sampling, labels, draw):
            x = state
    return x


def generate_uint8(
    model: DiffusionModel,
    sampling: Sampling,
    indices: Sequence[int],
    labels: Sequence[int] | None,
    seed: int,
    decode: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return `generate` as uint8 images (b, c, h, w), by `decode`, which may be an autoencoder's decoder.

    `decode` computes in float32 if the network does, otherwise in TF32 where the device has it, never in bfloat16.
    """
    with computing(model.device, decoding_precision(sampling, model.device)):
        return decode(generate(model, sampling, indices, labels, seed))


def decoding_precision(sampling: Sampling, device: torch.device) -> Precision:
    """Return the precision in which an autoencoder decodes: float32 for networks in float32, otherwise TF32."""
    return "float32" if chosen_precision(sampling.precision, device) == "float32" else "tf32"


def trajectory(
    model: DiffusionModel, sampling: Sampling, labels: Sequence[int] | None, draw: Callable[..., Tensor]
) -> Iterator[Tensor]:
    """Yield the states of one batch after each step, float32 (b, c, h, w); the last ones are the images.

    Args:
        model: the network, in eval mode.
        sampling: sampler, steps, guidance; an adaptive sampler takes a batch of one.
        labels: an int for each image; None for an unconditional network.
        draw: returns standard normal noise (b, c, h, w) as a function of a name and, after the first one, of the step.
    """
    denoiser = model.denoiser(sampling, labels)
    states = sampling.method.run(denoiser, draw("sample"), sampling.num_steps, lambda step: draw("sample step", step))
    for _, state in states:
        yield state


def total_nfe(count: int, sampling: Sampling) -> int:
    """Return the per-image network evaluations of `count` samples; a guided one counts twice."""
    return count * (sampling.nfe or ADAPTIVE) * (1 if sampling.guidance == 1.0 else 2)
