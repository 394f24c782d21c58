"""Options of all programs that sample from a checkpoint, as groups of a command line; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from uvit_decay.checkpoint.options import Weights
from uvit_decay.data.classes import class_numbers
from uvit_decay.files.instantiate import Trusted
from uvit_decay.terminal.command_line import Advanced
from uvit_decay.terminal.errors import MOST_SEED, UserError
from uvit_decay.terminal.program import or_bundled
from uvit_decay.terminal.typed import Bounds, check_types

LARGEST_GRID = 10_000  # images; a grid is assembled in memory
TIMM = "timm:"  # timm:NAME, with pretrained weights, or timm:NAME=FILE, with the weights of a file
MOST_IMAGES = 10_000_000  # 200 times what papers sample

Count = Annotated[int, Bounds(1, MOST_IMAGES)]
Seed = Annotated[int, Bounds(0, MOST_SEED)]
PrecisionOption = Literal["float32", "tf32", "bf16"]


@dataclass(frozen=True)
class LoadingOptions:
    """Loading of a checkpoint.

    Args:
        weights: ema or raw; default: EMA if the checkpoint has EMA weights.
        device: cpu, cuda, cuda:1, mps; default: the GPU if there is one.
        trust: other module or class to import and allow, see docs/extending.md; may be given several times.
    """

    weights: Weights | None = None
    device: str | None = None
    trust: Annotated[Sequence[Trusted | str], Advanced] = ()


@check_types
@dataclass(frozen=True)
class SamplingOptions(LoadingOptions):
    """Sampling from a checkpoint.

    Args:
        sampling_protocol: sit, uvit or dit: sampler, steps, guidance and labels with which a paper samples for its FID,
            see docs/sampling.md; names of results contain it, and the changes by other options.
        classes: comma-separated class names, for ImageNet also words (tench), or numbers; default: all, in a grid the
            first 10.
        labels: take classes in turn (balanced), or draw them at random from the seed and the number of the image;
            default: balanced in grids and while training, random with the papers' samplers, as for their FID,
            otherwise balanced.
        guidance: scale w of uncond + w (cond - uncond), or with a guide of bad + w (good - bad); 1 is none.
        guide: checkpoint of a worse network of the same images and classes, which guides instead of the null label
            (autoguidance); needs --guidance.
        guide_step: use the checkpoint step_N.ckpt beside --ckpt, from an earlier step of the same run, as the guide.
        guidance_interval: two times LOW,HIGH between which to guide, 0 is data and 1 is noise; default: all.
        guidance_channels: apply guidance to the first N channels only; default: all.
        sampler: dpm++, ddim, ddpm, euler-maruyama, euler, heun, dopri5; as the papers sample: uvit-dpm, uvit-dpm++,
            uvit-em, sit-ode, sit-sde, sit-sde-heun, dit-ddpm (DiT's networks only); or one that a module of --trust
            registers.
        clip: clamp the denoised image to [-1, 1] at every step; default: the checkpoint's setting, otherwise pixels are
            clipped, except with the papers' samplers.
        steps: number of sampling steps; default: the checkpoint's, or the default of another sampler.
        seed: seed of the noise and of random labels.
        batch_size: number of images per batch; does not change the images.
        vae: autoencoder that decodes latents, hub id or folder; default: the checkpoint's.
        precision: precision of the network; names and reports contain it unless it is float32; default: tf32 on CUDA
            GPUs, otherwise float32.
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
        if self.guide is None and self.guide_step is None:
            return
        if self.guide is not None and self.guide_step is not None:
            raise UserError("`guide` and `guide_step` both select a guide; give only one of them")
        flag = "`guide_step`" if self.guide is None else "`guide`"
        if self.guidance is None:
            raise UserError(f"{flag} needs a scale: the checkpoint's scale is for the null label; set `guidance`")
        if self.sampling_protocol is not None:
            raise UserError(f"{flag} cannot be combined with `sampling_protocol` {self.sampling_protocol}")

    def guide_file(self, ckpt: Path) -> Path | None:
        """Return the checkpoint that guides the network in `ckpt`; None without a guide."""
        if self.guide is not None:
            path = or_bundled(self.guide)
            if not path.exists():
                raise UserError(f"`guide` {self.guide}: no such file; give a .ckpt or .safetensors file")
            return path
        if self.guide_step is None:
            return None
        path = ckpt.parent / f"step_{self.guide_step:08d}.ckpt"
        if not path.exists():
            kept = sorted(other.name for other in ckpt.parent.glob("step_*.ckpt"))
            there = ", ".join(kept) or "no step, because keep_every_n_steps of its LastCheckpoint was 0"
            raise UserError(f"`guide_step` {self.guide_step}: {path} does not exist; the run kept {there}")
        return path

    def files(self, ckpt: Path) -> list[Path]:
        """Return the files that sampling from `ckpt` reads: the checkpoint and, if there is one, the guide."""
        files = [ckpt]
        guide = self.guide_file(ckpt)
        if guide is not None:
            files.append(guide)
        return files

    def chosen_classes(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of the classes to sample, by default all.

        Args:
            names: names of the checkpoint's classes; empty for an unconditional network.
        """
        if not names and (self.classes or self.labels):
            flag = "`classes`" if self.classes else "`labels`"
            raise UserError(f"{flag}: this checkpoint is unconditional; leave out {flag}")
        if not self.classes:
            return list(range(len(names)))
        return class_numbers(self.classes, names)

    def changes(self) -> dict[str, Any]:
        """Return the fields of `Sampling` that are set by options."""
        names = ("sampler", "steps", "guidance", "guidance_channels", "guidance_interval", "clip", "precision")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
