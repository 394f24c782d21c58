"""Options of the probes and of the figures of features, as groups of a command line; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from uvit_decay.runtime.command_line import Bounds, check_bounds
from uvit_decay.runtime.errors import UserError
from uvit_decay.sampling_options import LARGEST_GRID, Count, LoadingOptions, PrecisionOption, Seed

TIMES = (0.01, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
Most = Annotated[int, Bounds(1, 2**31)]
Pool = Literal["mean", "all", "cls"]


@dataclass(frozen=True, kw_only=True)
class ProtocolOptions:
    """Options that all protocols share, of probes and of classification.

    Args:
        max_train: training images at most, a fixed random choice.
        max_test: test images at most, likewise.
        neighbours: k of the nearest neighbours.
        uniform: one vote for each neighbour, instead of DINO's weights.
        batch_size: images at a time on each device.
    """

    pool: Pool | None = None
    max_train: Most = 10_000_000
    max_test: Most = 10_000_000
    neighbours: Most = 20
    uniform: Annotated[bool, "--knn-uniform"] = False
    draws: Annotated[int, Bounds(1, 1000)] = 5
    seed: Seed = 0
    batch_size: Most = 256

    def __post_init__(self) -> None:
        check_bounds(type(self), vars(self))

    @property
    def name(self) -> str:
        """The options that are not the defaults and change results, for names of files: "-pool-cls-layer-3"."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "batch_size"}
        changed = {name: value for name, value in values.items() if value != getattr(type(self), name)}
        return "".join(f"-{k}-{'+'.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in changed.items())


@dataclass(frozen=True, kw_only=True)
class Probing(ProtocolOptions):
    """Probes of features.

    Args:
        protocol: paper: linear probes of one noise an image, the best layer and noise level chosen on held-out training
            images, nearest neighbours, rank; ddae: new noise in every pass, the best on test; repa: linear probes and
            alignment with a reference, the best on test; or one that a module of --trust registers.
        times: comma-separated noise levels in (0, 1), of a denoiser; default:
            0.01,0.03,0.05,0.1,0.15,0.2,0.3,0.5. Encoders see clean images.
        layers: comma-separated numbers or names; default: all.
        pool: mean of patch tokens, or of all tokens, or the class token.
        seed: of the noise, and of the order and initial weights of ddae and repa.
        draws: noise draws of a denoiser's images, of whose results mean and standard deviation are reported.
        epochs: passes of ddae and repa over the training images; default: 15 of ddae, 90 of repa.
    """

    times: tuple[float, ...] | None = None
    layers: tuple[str, ...] | None = None
    pool: Pool = "mean"
    max_train: Most = 50_000
    max_test: Most = 10_000
    protocol: str = "paper"
    draws: Annotated[int, Bounds(1, 1000)] = 1
    epochs: Annotated[int, Bounds(1, 10_000)] | None = None

    def __post_init__(self) -> None:
        if self.times is not None:
            check_times(self.times)
        if self.protocol == "paper" and self.epochs is not None:
            raise UserError("--epochs are of the protocols ddae and repa: leave them out")
        super().__post_init__()

    def levels(self, encoder: bool) -> tuple[float, ...]:
        """Return the noise levels: those of a denoiser, or 0 alone, clean images, of an encoder.

        Raises:
            UserError: times, several noise draws or fresh noise that were asked of an encoder.
        """
        if not encoder:
            return self.times or TIMES
        if self.times is not None or self.draws > 1 or self.protocol == "ddae":
            what = "times, noise draws and the protocol ddae, with new noise in every pass, are of denoisers"
            raise UserError(f"{what}, this network is an encoder and sees clean images: leave them out")
        return (0.0,)


@dataclass(frozen=True)
class Alignment:
    """Reference of --protocol repa.

    Args:
        reference: encoder of the same images: timm:NAME, timm:NAME=FILE, a checkpoint of an encoder, or raw pixels,
            pixels:32x32x3.
        reference_size: side of the images that a timm model sees; checkpoints have their own.
        alignment_images: test images at most whose neighbours are compared, a fixed random choice; REPA has 10000.
    """

    reference: Path = Path("timm:vit_large_patch14_dinov2.lvd142m")
    reference_size: Annotated[int, Bounds(1, 4096)] = 224
    alignment_images: Annotated[int, Bounds(12, 2**31)] = 2000

    def __post_init__(self) -> None:
        check_bounds(type(self), vars(self))

    @property
    def name(self) -> str:
        """The numbers that are not the defaults, for names of files: "-alignment_images-10000"."""
        return "".join(
            f"-{name}-{getattr(self, name)}"
            for name in ("reference_size", "alignment_images")
            if getattr(self, name) != getattr(type(self), name)
        )


@dataclass(frozen=True, kw_only=True)
class Visualization(LoadingOptions):
    """Figures of features.

    Args:
        ckpt: a .ckpt or .safetensors, or timm's timm:NAME or timm:NAME=FILE.
        images: folder, zip, tar, .npz or data set, such as digits:test.
        layer: comma-separated numbers or names; default: the middle one of a denoiser, the last of an encoder.
        time: noise level in (0, 1), of a denoiser; default: 0.1. Encoders see clean images.
        num: images, of which the first 16 are drawn.
        views: what to draw.
        masks: folder of PNGs named as the images: values are classes, 255 none.
        clusters: default: the number of classes in the masks, or 6.
        neighbours: of a patch in spectral clustering.
        fit: images that the colours of pca are of.
        points: images in t-SNE.
        seed: of noise, k-means and t-SNE.
        batch_size: images at a time.
        vae: autoencoder that encodes for latents; default: the checkpoint's.
        precision: of the network; in titles unless float32.
        out: t-SNE's has _tsne in its name.
    """

    ckpt: Path
    images: Annotated[str, "--pictures"]
    layer: tuple[str, ...] | None = None
    time: float | None = None
    num: Count = 8
    views: tuple[Literal["pca", "spectral", "tsne"], ...] = ("pca", "spectral")
    masks: Path | None = None
    clusters: Annotated[int, Bounds(2, 255)] | None = None
    neighbours: Annotated[int, Bounds(1, 2**16)] = 50
    fit: Count = 256
    points: Count = 1000
    seed: Seed = 0
    batch_size: Count = 64
    vae: str | None = None
    precision: PrecisionOption = "float32"
    out: Path = Path("features.png")

    def __post_init__(self) -> None:
        if self.masks and "spectral" not in self.views:
            raise UserError("--masks are compared with spectral clusters: add spectral to --views")


@dataclass(frozen=True, kw_only=True)
class Classification(ProtocolOptions):
    """Protocols.

    Args:
        protocol: what to compute: some of in100-linear, logistic, knn, few-shot-1, few-shot-5, few-shot-10, and those
            that a module of --trust registers.
        pool: mean of patch tokens, of all tokens, or the class token; default: the protocol's, all for in100-linear
            and logistic, else mean.
        layer: number or name; default: the last of an encoder, the middle of a denoiser.
        time: noise level in (0, 1), of a denoiser; default: 0.1. Encoders see clean images.
        norm: apply the network's final layer norm before pooling.
        epochs: of in100-linear.
        temperature: T of the votes exp(similarity / T) of nearest neighbours.
        draws: of the few shots.
        seed: of noise, draws, initial weights and order.
    """

    protocol: tuple[str, ...] = ("in100-linear", "logistic", "knn")
    layer: str | None = None
    time: float | None = None
    norm: bool = False
    epochs: Annotated[int, Bounds(1, 10_000)] = 200
    temperature: float = 0.07

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UserError(f"--temperature must be positive, got {self.temperature:g}")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class Reconstruction(LoadingOptions):
    """Reconstructions of masked images.

    Args:
        ckpt: a .ckpt or .safetensors of a masked autoencoder.
        images: folder, zip, tar, .npz or data set, such as digits:test.
        num: images, a fixed random choice.
        mask_ratio: share of the patches that are removed, in (0, 1).
        seed: of the masks.
        batch_size: images at a time.
        out: picture.
    """

    ckpt: Path
    images: Annotated[str, "--pictures"]
    num: Annotated[int, Bounds(1, LARGEST_GRID)] = 16
    mask_ratio: float = 0.75
    seed: Seed = 0
    batch_size: Count = 64
    out: Path = Path("reconstructions.png")


def chosen_level(time: float | None, encoder: bool) -> float:
    """Return the noise level, by default 0.1, or 0 for an encoder; raise a UserError for a time that cannot be one."""
    if time is None:
        return 0.0 if encoder else 0.1
    if encoder:
        raise UserError("--time is of denoisers, this network is an encoder and sees clean images: leave it out")
    check_times((time,))
    return time


def check_times(times: Sequence[float]) -> None:
    """Raise a UserError unless all times lie in (0, 1), and there is one."""
    if not times or not all(0.0 < t < 1.0 for t in times):
        raise UserError(f"probe times must lie in (0, 1), got {list(times)}")
