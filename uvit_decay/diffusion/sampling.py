"""Sampling of images from a network; image i depends only on (seed, i) and its label, not on the batch size.

Notation as in noise_path.py; b = batch, c = channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from uvit_decay.diffusion.denoiser import Denoiser
from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.diffusion.prediction import Network, Prediction, sampling_interval, x_eps_from_output
from uvit_decay.diffusion.samplers import SAMPLERS, Sampler, sde_sampler
from uvit_decay.diffusion.sde import SDE, short_number
from uvit_decay.runtime.constants import TIME_ROUNDING
from uvit_decay.runtime.precision import Precision, chosen_precision, computing
from uvit_decay.runtime.random import ROWS, RowNumbers, indices_on, list_whole_numbers, normal
from uvit_decay.terminal.errors import UserError, check_choice, check_whole, require_shape
from uvit_decay.terminal.typed import Positive, Within, check_types

ADAPTIVE = 100  # assumed network evaluations of an adaptive sampler


@check_types
@dataclass(frozen=True)
class Sampling:
    """Options of sampling.

    Args:
        sampler: a name in `uvit_decay.diffusion.samplers.SAMPLERS`.
        steps: steps of the sampler, 1 to 1000; null means the sampler's default, such as 25 for dpm++. Most samplers
            evaluate the network once per step, Heun's method twice; dopri5 chooses its steps itself and ignores it.
        guidance: scale w of uncond + w (cond - uncond), 0 to a million; 1 is no guidance.
        clip: clamp the denoised image to [-1, 1] at every step; null means for pixels, but not for latents, nor with a
            sampler that is named after a paper.
        guidance_channels: apply guidance to the first N channels only; null means all. SiT's code guides 3 of 4.
        guidance_interval: guide only at these times, 0 is data and 1 is noise; null means at all times.
        sde: the SDE to integrate, for the samplers of an SDE; null means the sampler's default.
        precision: precision of the network: float32, tf32 or bf16; null means tf32 on CUDA GPUs, float32 elsewhere.
            The sampler itself computes in float32.
    """

    sampler: str = "dpm++"
    steps: int | None = None
    guidance: Annotated[float, Within("[0, 1000000]")] = 1.0
    clip: bool | None = None
    guidance_channels: Positive | None = None
    guidance_interval: tuple[float, float] | None = None
    sde: SDE | None = None
    precision: Precision | None = None

    def __post_init__(self) -> None:
        check_choice(SAMPLERS, sampler=self.sampler)
        fewest = SAMPLERS[self.sampler].fewest
        if self.steps is not None and not fewest <= self.steps <= 1000:
            raise UserError(f"{self.sampler} takes a whole number from {fewest} to 1000, got {self.steps}", "steps")
        low, high = self.guidance_interval or (0.0, 1.0)
        if not 0 <= low < high <= 1:
            raise UserError(f"guidance_interval must be LOW,HIGH with 0 <= LOW < HIGH <= 1, got {low},{high}")
        if self.sde and not SAMPLERS[self.sampler].sde:
            raise UserError(
                f"sampler {self.sampler} does not integrate an sde; leave out the sde, or use a sampler such as sit-sde"
            )

    @property
    def method(self) -> Sampler:
        """The sampler, with the chosen SDE."""
        sampler = SAMPLERS[self.sampler]
        if self.sde:
            return sde_sampler(self.sde, sampler.steps, sampler.paper)
        return sampler

    @property
    def num_steps(self) -> int:
        """`steps`, or the sampler's default."""
        return self.steps or self.method.steps

    @property
    def nfe(self) -> int | None:
        """Network evaluations (NFE) per image, a guided one counted once; None if adaptive (see `NFECounter`)."""
        return self.method.nfe(self.num_steps)

    def changed(self, **given: Any) -> Sampling:
        """Return these options with the `given` ones; another sampler gets its default steps, clipping and SDE."""
        defaults = {}
        if given.get("sampler", self.sampler) != self.sampler:
            defaults = {"steps": None, "clip": None, "sde": None}
        return replace(self, **defaults | given)

    def metadata(self) -> dict[str, Any]:
        """Return plain values for reports: the fields, the actual number of steps and the network evaluations."""
        return {**asdict(self), "steps": self.num_steps, "nfe": self.nfe}

    @property
    def name(self) -> str:
        """A short name for keys and files, such as `dpm++25_w2`; it differs if the images can differ."""
        steps = "" if self.nfe is None else self.num_steps
        parts = [f"{self.sampler}{steps}", f"w{short_number(self.guidance)}"]
        if self.clip:
            parts.append("clip")
        elif self.clip is False and not self.method.paper:
            parts.append("noclip")
        if self.guidance_channels is not None:
            parts.append(f"first{self.guidance_channels}")
        if self.guidance_interval:
            low = short_number(self.guidance_interval[0])
            high = short_number(self.guidance_interval[1])
            parts.append(f"t{low}-{high}")
        if self.sde:
            parts.append(self.sde.name)
        if self.precision not in (None, "float32"):
            parts.append(self.precision)
        return "_".join(parts)


@check_types
@dataclass(frozen=True)
class DiffusionModel:
    """Trained network with all that sampling needs.

    Args:
        net: the network net(x, t, y).
        path: the noise path.
        prediction: the quantity that the network predicts.
        shape: shape (c, h, w) of an image.
        num_classes: number of classes, 0 for an unconditional network.
        null_label: whether the network was trained with the label "no label" (= num_classes).
        device: device of the network.
        pixels: false for latents.
        learned_variance: whether the network returns twice the channels; the second half is then v of
            `uvit_decay.diffusion.ode.dit_ddpm`.
        guide: a worse network for autoguidance, instead of the null label.
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
    guide: DiffusionModel | None = None

    @classmethod
    def from_net(
        cls, net: Any, path: NoisePath, prediction: Prediction, device: torch.device, pixels: bool = True
    ) -> DiffusionModel:
        """Build from a network with the attributes `image_size`, `channels`, `num_classes` and `null_label`.

        The attribute `learned_variance` is optional.
        """
        shape = (net.channels, net.image_size, net.image_size)
        variance = getattr(net, "learned_variance", False)
        return cls(net, path, prediction, shape, net.num_classes, net.null_label, device, pixels, variance)

    def check(self, sampling: Sampling) -> None:
        """Raise a UserError if the network does not support the options of `sampling`."""
        sampling.method.check(self.path, sampling.sampler)
        if sampling.method.learned_variance and not self.learned_variance:
            raise UserError(f"sampler {sampling.sampler} needs a network with a learned variance, as DiT's; use ddpm")
        if self.guide is not None and sampling.guidance_channels is not None:
            raise UserError("it is for guidance by the null label; leave it out with a guide", "guidance_channels")
        if self.guide is not None or sampling.guidance != 1.0:
            self._guidance(sampling).check(self)

    def check_labels(self, labels: RowNumbers) -> list[int]:
        """Return labels as a list; raise a UserError unless each is a class of this network or the null label."""
        if not self.num_classes:
            raise UserError("labels: this network is unconditional; give None")
        last = self.num_classes - 1 + self.null_label
        return list_whole_numbers("labels", labels, last)

    def check_rows(
        self, indices: RowNumbers, labels: RowNumbers | None, seed: int
    ) -> tuple[list[int], list[int] | None]:
        """Return indices and labels as lists; raise a UserError for a wrong one, other counts or a negative seed."""
        check_whole(0, 2**63 - 1, seed=seed)
        indices = list_whole_numbers("indices", indices, ROWS - 1)
        if labels is None:
            return indices, None
        labels = self.check_labels(labels)
        if len(labels) != len(indices):
            raise UserError(f"labels: give one for each of the {len(indices)} indices, got {len(labels)}")
        return indices, labels

    def denoiser(self, sampling: Sampling, labels: RowNumbers | None) -> Denoiser:
        """Return the denoiser to integrate, with the guidance of `sampling`, for a batch with these labels."""
        y = None if labels is None else indices_on(self.device, self.check_labels(labels))
        clip = self.clips(sampling)
        if sampling.guidance == 1.0:
            return self.plain(y, clip)
        return self._guidance(sampling).wrap(self, y, clip)

    def plain(self, y: Tensor | None, clip: bool) -> Denoiser:
        """Return the denoiser without guidance, for a batch with the labels y (b,) int64.

        `clip` clamps x to [-1, 1] and computes eps from it. With a learned variance the second half of the network's
        channels is v: (x, eps, v).
        """
        channels = self.shape[0]

        def denoise(x_t: Tensor, t: Tensor) -> tuple[Tensor, ...]:
            out = self.net(x_t, t, y).to(x_t)
            outputs = 2 * channels if self.learned_variance else channels
            require_shape((len(x_t), outputs, *x_t.shape[2:]), network_output=out)
            x, eps = x_eps_from_output(self.path, self.prediction, x_t, out[:, :channels], t)
            if clip:
                x = x.clamp(-1, 1)
                eps = self.path.eps_from_x(x_t, x, t)
            if self.learned_variance:
                return x, eps, out[:, channels:]
            return x, eps

        low, high = sampling_interval(self.path, self.prediction, clip)
        return Denoiser(denoise, self.path, low, high)

    def _guidance(self, sampling: Sampling) -> Guidance:
        """Return the guidance of `sampling`: by the null label, or by `guide` if there is one."""
        guidance: Guidance = ClassifierFree(sampling.guidance, sampling.guidance_channels)
        if self.guide is not None:
            guidance = Autoguidance(sampling.guidance, self.guide)
        if sampling.guidance_interval is not None:
            guidance = WithinInterval(guidance, sampling.guidance_interval)
        return guidance

    def clips(self, sampling: Sampling) -> bool:
        """Return whether the denoised image is clipped at every step."""
        if sampling.clip is not None:
            return sampling.clip
        return self.pixels and not sampling.method.paper

    def unguided(self, sampling: Sampling) -> Sampling:
        """Return `sampling`, without guidance if the network cannot be guided (no classes or no null label)."""
        if self.num_classes and self.null_label:
            return sampling
        return replace(sampling, guidance=1.0)

    def in_precision(self, sampling: Sampling) -> Sampling:
        """Return `sampling` with a precision: the given one, or the device's default."""
        precision = chosen_precision(sampling.precision, self.device)
        return replace(sampling, precision=precision)


class Guidance(ABC):
    """A change of the denoiser of a network (abstract)."""

    @abstractmethod
    def check(self, model: DiffusionModel) -> None:
        """Raise a UserError if the network cannot be guided in this way."""

    @abstractmethod
    def wrap(self, model: DiffusionModel, y: Tensor | None, clip: bool) -> Denoiser:
        """Return the guided denoiser of the network, for a batch with the labels y (b,) int64."""


@dataclass(frozen=True)
class ClassifierFree(Guidance):
    """Guidance by the null label: uncond + scale (cond - uncond) of the outputs, by one batch of twice the size.

    A learned variance is taken from the labelled prediction. The halves are combined in the precision of x, also for a
    network in half precision. `channels` first channels are guided; None means all. SiT's and DiT's codes guide 3 of 4.
    """

    scale: float
    channels: int | None = None

    def check(self, model: DiffusionModel) -> None:
        if not model.num_classes or not model.null_label:
            raise UserError(
                "guidance needs a class-conditional network that was trained with a null label, "
                "this one is not; use guidance 1"
            )
        if (self.channels or 1) > model.shape[0]:
            raise UserError(f"guidance_channels {self.channels}: this network has {model.shape[0]}")

    def wrap(self, model: DiffusionModel, y: Tensor | None, clip: bool) -> Denoiser:
        if y is None:
            raise UserError("guidance needs a label for each image")
        labels = torch.cat([y, torch.full_like(y, model.num_classes)])
        channels = model.shape[0] if self.channels is None else self.channels

        def net(x: Tensor, t: Tensor, _: Tensor) -> Tensor:
            out = model.net(torch.cat([x, x]), torch.cat([t, t]), labels)
            cond, uncond = out.to(x).chunk(2)
            guided = torch.lerp(uncond, cond, self.scale)
            return torch.cat([guided[:, :channels], cond[:, channels:]], dim=1)

        return replace(model, net=net).plain(y, clip)


@dataclass(frozen=True)
class Autoguidance(Guidance):
    """Guidance by a worse network: D = D_bad + scale (D_good - D_bad) of two denoisers, for the same labels.

    Source: Karras et al. 2024, "Guiding a Diffusion Model with a Bad Version of Itself". The networks may predict
    different quantities. Clipping clamps the combined x to [-1, 1].
    """

    scale: float
    guide: DiffusionModel

    def check(self, model: DiffusionModel) -> None:
        for name in ("shape", "num_classes", "path", "pixels"):
            ours = getattr(model, name)
            theirs = getattr(self.guide, name)
            if ours != theirs:
                raise UserError(f"it has {name} {theirs}, the network has {ours}", argument="guide")

    def wrap(self, model: DiffusionModel, y: Tensor | None, clip: bool) -> Denoiser:
        good = model.plain(y, clip=False)
        bad = self.guide.plain(y, clip=False)

        def denoise(x_t: Tensor, t: Tensor) -> tuple[Tensor, ...]:
            x_good, eps_good, *variance = good.fn(x_t, t)
            x_bad, eps_bad, *_ = bad.fn(x_t, t)
            x = torch.lerp(x_bad, x_good, self.scale)
            if not clip:
                return x, torch.lerp(eps_bad, eps_good, self.scale), *variance
            x = x.clamp(-1, 1)
            return x, model.path.eps_from_x(x_t, x, t), *variance

        low, high = sampling_interval(model.path, model.prediction, clip)
        guide_low, guide_high = sampling_interval(model.path, self.guide.prediction, clip)
        return Denoiser(denoise, model.path, max(low, guide_low), min(high, guide_high))


@dataclass(frozen=True, kw_only=True)
class SwitchedDenoiser(Denoiser):
    """Denoiser that is replaced by `plain` outside of a closed interval of times."""

    plain: Denoiser
    interval: tuple[float, float]

    def evaluate(self, x: Tensor, time: float) -> tuple[Tensor, ...]:
        low, high = self.interval
        # `time` is a float on the host, so this comparison does not wait for the device.
        if low - TIME_ROUNDING <= time <= high + TIME_ROUNDING:
            return super().evaluate(x, time)
        return self.plain.evaluate(x, time)


@dataclass(frozen=True)
class WithinInterval(Guidance):
    """Another guidance, within a closed interval of times."""

    guidance: Guidance
    interval: tuple[float, float]

    def check(self, model: DiffusionModel) -> None:
        self.guidance.check(model)

    def wrap(self, model: DiffusionModel, y: Tensor | None, clip: bool) -> Denoiser:
        guided = self.guidance.wrap(model, y, clip)
        return SwitchedDenoiser(**vars(guided), plain=model.plain(y, clip), interval=self.interval)


@check_types
@torch.no_grad()
def generate(
    model: DiffusionModel, sampling: Sampling, indices: RowNumbers, labels: RowNumbers | None, seed: int
) -> Tensor:
    """Return the images with these `indices` as a float32 batch (b, c, h, w) of about [-1, 1].

    Args:
        model: the network, in eval mode, with the weights to sample with.
        sampling: sampler, steps, guidance.
        indices: indices of the images within the sequence of this seed, from 0.
        labels: an int for each index, num_classes is the null label; None for an unconditional network.
        seed: seed of the noise, not negative.
    """
    model.check(sampling)
    indices, labels = model.check_rows(indices, labels, seed)
    if sampling.nfe is None and len(indices) > 1:  # an adaptive sampler takes one image at a time
        images = []
        for i, index in enumerate(indices):
            label = None if labels is None else labels[i : i + 1]
            images.append(generate(model, sampling, [index], label, seed))
        return torch.cat(images)
    rows = indices_on(model.device, indices)

    def draw(name: str, *step: int) -> Tensor:
        return normal(name, seed, *step, rows=rows, shape=model.shape)

    with computing(model.device, chosen_precision(sampling.precision, model.device)):
        for state in trajectory(model, sampling, labels, draw):
            x = state
    return x


@check_types
def generate_uint8(
    model: DiffusionModel,
    sampling: Sampling,
    indices: RowNumbers,
    labels: RowNumbers | None,
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
    precision = chosen_precision(sampling.precision, device)
    return "float32" if precision == "float32" else "tf32"


def trajectory(
    model: DiffusionModel, sampling: Sampling, labels: Sequence[int] | None, draw: Callable[..., Tensor]
) -> Iterator[Tensor]:
    """Yield the states of one batch after each step, float32 (b, c, h, w); the last state has the images.

    Args:
        model: the network, in eval mode.
        sampling: sampler, steps, guidance; an adaptive sampler takes a batch of one.
        labels: an int for each image; None for an unconditional network.
        draw: function that returns standard normal noise (b, c, h, w): draw("sample") for the start, and
            draw("sample step", k) for step k.
    """
    denoiser = model.denoiser(sampling, labels)
    draw_step = partial(draw, "sample step")
    for _, state in sampling.method.run(denoiser, draw("sample"), sampling.num_steps, draw_step):
        yield state


def total_nfe(count: int, sampling: Sampling) -> int:
    """Return the sum of network evaluations of `count` samples; a guided one counts twice."""
    networks = 1 if sampling.guidance == 1.0 else 2
    return count * (sampling.nfe or ADAPTIVE) * networks
