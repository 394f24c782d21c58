"""Options of all programs that sample from a checkpoint, as groups of a command line; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from uvit_decay.class_names import class_numbers
from uvit_decay.runtime.command_line import Advanced, Bounds, check_bounds
from uvit_decay.runtime.errors import MOST_SEED, UserError
from uvit_decay.runtime.instantiate import Trusted
from uvit_decay.runtime.program import or_bundled

LARGEST_GRID = 10_000  # images; a grid is assembled in memory
MOST_IMAGES = 10_000_000  # 200 times what papers sample

Count = Annotated[int, Bounds(1, MOST_IMAGES)]
Seed = Annotated[int, Bounds(0, MOST_SEED)]
PrecisionOption = Literal["float32", "tf32", "bf16"]
Weights = Literal["ema", "raw"]


@dataclass(frozen=True)
class LoadingOptions:
    """Loading of a checkpoint.

    Args:
        weights: ema or raw; default: EMA where the checkpoint has them.
        device: cpu, cuda, cuda:1, mps; default: the GPU if there is one.
        trust: module or class from elsewhere to import and allow, as docs/extending.md shows; may be given again.
    """

    weights: Weights | None = None
    device: str | None = None
    trust: Annotated[Sequence[Trusted], Advanced] = ()


@dataclass(frozen=True)
class SamplingOptions(LoadingOptions):
    """Sampling from a checkpoint.

    Args:
        sampling_protocol: sit, uvit or dit: sampler, steps, guidance and labels as a paper samples for its FID, see
            docs/sampling.md; names of results contain it, and what other options change of it.
        classes: comma-separated numbers or names of classes, ImageNet's in words, too (tench); default: all, the first
            10 in a grid.
        labels: classes in turn, or drawn at random, a function of seed and number of the image; default: balanced in a
            grid and while training, random with the papers' samplers, as for their FID, else balanced.
        guidance: scale w of uncond + w (cond - uncond), or with a guide of bad + w (good - bad); 1 is none.
        guide: checkpoint of a worse network of the same images and classes, which guides instead of the null label
            (autoguidance); needs --guidance.
        guide_step: the guide is the checkpoint step_N.ckpt beside --ckpt, an earlier one of the same run.
        guidance_interval: two times LOW,HIGH between which to guide, 0 is data and 1 is noise; default: all.
        guidance_channels: guide the first so many channels only; default: all.
        sampler: dpm++, ddim, ddpm, euler-maruyama, euler, heun, dopri5; as the papers sample: uvit-dpm, uvit-dpm++,
            uvit-em, sit-ode, sit-sde, sit-sde-heun, dit-ddpm (DiT's networks only); or one that a module of --trust
            registers.
        clip: clamp the denoised image to [-1, 1] at every step; default: the checkpoint's, else pixels are clipped, but
            not by the papers' samplers.
        steps: default: the checkpoint's, or another sampler's own.
        seed: of the noise and of random labels.
        batch_size: images at a time; changes no image.
        vae: autoencoder that decodes latents, hub id or folder; default: the checkpoint's.
        precision: of the network; part of names and reports unless float32; default: tf32 on CUDA GPUs, float32
            elsewhere.
    """

    sampling_protocol: Annotated[str | None, Advanced] = None
    classes: tuple[str, ...] | None = None
    labels: Annotated[Literal["balanced", "random"] | None, Advanced] = None
    guidance: float | None = None
    guide: Annotated[Path | None, Advanced] = None
    guide_step: Annotated[int | None, Bounds(0, 2**63 - 1), Advanced] = None
    guidance_interval: Annotated[tuple[float, float] | None, Advanced] = None
    guidance_channels: Annotated[int | None, Advanced] = None
    sampler: str | None = None
    clip: Annotated[bool | None, Advanced] = None
    steps: int | None = None
    seed: Seed = 0
    batch_size: Count = 64
    vae: Annotated[str | None, Advanced] = None
    precision: Annotated[PrecisionOption | None, Advanced] = None

    def __post_init__(self) -> None:
        check_bounds(type(self), vars(self))
        self._check_guide()

    def _check_guide(self) -> None:
        """Raise a UserError for options that autoguidance lacks, or does not go with."""
        if self.guide is None and self.guide_step is None:
            return
        flag = "--guide-step" if self.guide is None else "--guide"
        if self.guide is not None and self.guide_step is not None:
            raise UserError("--guide and --guide-step both name a guide: give one of them")
        if self.guidance is None:
            raise UserError(f"{flag} needs a scale, since the checkpoint's is for the null label: set --guidance")
        if self.guidance_channels is not None:
            raise UserError(f"--guidance-channels is for guidance by the null label: leave it out with {flag}")
        if self.sampling_protocol is not None:
            raise UserError(f"--sampling-protocol {self.sampling_protocol} has no guide: leave it out with {flag}")

    def guide_file(self, ckpt: Path) -> Path | None:
        """Return the checkpoint that guides the network in `ckpt`; None without a guide.

        Raises:
            UserError: the file, or the checkpoint of this step, does not exist.
        """
        if self.guide is not None:
            found = self.guide if self.guide.exists() else or_bundled(self.guide)
            if not found.exists():
                raise UserError(f"--guide {self.guide} does not exist: give a .ckpt or .safetensors file")
            return found
        if self.guide_step is None:
            return None
        path = ckpt.parent / f"step_{self.guide_step:08d}.ckpt"
        if not path.exists():
            kept = sorted(other.name for other in ckpt.parent.glob("step_*.ckpt"))
            there = ", ".join(kept) or "no step, since keep_every_n_steps of its LastCheckpoint was 0"
            raise UserError(f"--guide-step {self.guide_step}: {path} does not exist; the run kept {there}")
        return path

    def files(self, ckpt: Path) -> list[Path]:
        """Return the files that sampling from `ckpt` reads: the checkpoint and, if there is one, the guide."""
        guide = self.guide_file(ckpt)
        return [ckpt] if guide is None else [ckpt, guide]

    def chosen_classes(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of the classes to sample, of these names, by default all; empty if there are none.

        Raises:
            UserError: a class that does not exist, or classes or labels for an unconditional network.
        """
        if not names and (self.classes or self.labels):
            raise UserError(f"this checkpoint is unconditional: leave out --{'classes' if self.classes else 'labels'}")
        return class_numbers(self.classes, names) if self.classes else list(range(len(names)))

    def changes(self) -> dict[str, Any]:
        """Return the fields of `Sampling` that the options give."""
        names = ("sampler", "steps", "guidance", "guidance_channels", "guidance_interval", "clip", "precision")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
