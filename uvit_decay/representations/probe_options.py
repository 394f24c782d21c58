"""Options of the probes and of reconstructions, as groups of a command line; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from uvit_decay.generation.options import LARGEST_GRID, Count, LoadingOptions, Seed
from uvit_decay.runtime.constants import Pool
from uvit_decay.terminal.typed import Bounds, Needs, Within, check_types

TIMES = (0.01, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
TIME = 0.1  # noise level of a denoiser's images where a command reads a single one
NOISE_ALONE = "noise-share"  # --protocol of the noise share without probes
NOISE_DRAWS = 4  # draws of each image for it
FEW_SHOTS = ("few-shot-1", "few-shot-5", "few-shot-10")
Most = Annotated[int, Bounds(1, 2**31)]
Epochs = Annotated[int, Bounds(1, 10_000)]


def name_changes(options: Any, *unnamed: str) -> str:
    """Return the options that are not the defaults, for file names: "-pool-cls-layer-3"; those in `unnamed` are not."""
    name = ""
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in unnamed or value == field.default:
            continue
        if isinstance(value, tuple):
            value = "+".join(map(str, value))
        name += f"-{field.name}-{value}"
    return name


@dataclass(frozen=True, kw_only=True)
class ProtocolOptions:
    """Options that all protocols share, of probes and of classification.

    Args:
        max_train: largest number of training images; a fixed random choice if there are more.
        max_test: largest number of test images; a fixed random choice if there are more.
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

    @property
    def name(self) -> str:
        """The options that change results and are not the defaults, for file names."""
        return name_changes(self, "batch_size")


@check_types
@dataclass(frozen=True, kw_only=True)
class Probing(ProtocolOptions):
    """Probes of features.

    Args:
        protocol: paper: linear probes with one noise per image, the best layer and noise level chosen on held-out
            training images, nearest neighbours, rank; ddae: new noise in every pass, the best on test; repa: linear
            probes and alignment with a reference, the best on test; noise-share: the noise share alone, without any
            classifier; or one that a module of --trust registers.
        times: comma-separated noise levels in (0, 1), for a denoiser; default:
            0.01,0.03,0.05,0.1,0.15,0.2,0.3,0.5. Encoders see clean images.
        layers: comma-separated numbers or names; default: all.
        pool: mean of patch tokens, or of all tokens, or the class token.
        seed: of the noise, and of the order and initial weights of ddae and repa.
        draws: noise draws of a denoiser's images; with several, the mean and standard deviation are reported.
        epochs: passes of ddae and repa over the training images; default: 15 for ddae, 90 for repa.
        noise_draws: noise draws of each image for the noise share of a denoiser's layers, at least 2; default: it is
            not measured, with --protocol noise-share 4.
        noise_images: test images for the noise share, a fixed random choice.
    """

    NEEDS = {
        "epochs": Needs("protocol", unless=("paper", NOISE_ALONE)),
        "neighbours": Needs("protocol", unless=("ddae", "repa", NOISE_ALONE)),
        "uniform": Needs("protocol", unless=("ddae", "repa", NOISE_ALONE)),
        "pool": Needs("protocol", unless=(NOISE_ALONE,)),
        "max_train": Needs("protocol", unless=(NOISE_ALONE,)),
        "max_test": Needs("protocol", unless=(NOISE_ALONE,)),
        "draws": Needs("protocol", unless=(NOISE_ALONE,)),
    }
    times: Annotated[tuple[float, ...] | None, Within("(0, 1)")] = None
    layers: tuple[str, ...] | None = None
    pool: Pool = "mean"
    max_train: Most = 50_000
    max_test: Most = 10_000
    protocol: str = "paper"
    draws: Annotated[int, Bounds(1, 1000)] = 1
    epochs: Epochs | None = None
    noise_draws: Annotated[int, Bounds(2, 1000)] | None = None
    noise_images: Annotated[int, Bounds(2, 2**31)] = 512

    @property
    def draws_of_noise(self) -> int:
        """Noise draws of each image for the noise share; 0 if it is not measured."""
        if self.noise_draws is None and self.protocol == NOISE_ALONE:
            return NOISE_DRAWS
        return self.noise_draws or 0

    def levels(self, encoder: bool) -> tuple[float, ...]:
        """Return the noise levels: of a denoiser `times` or TIMES, of an encoder 0 alone, clean images."""
        if encoder:
            return (0.0,)
        return self.times or TIMES


@check_types
@dataclass(frozen=True)
class Alignment:
    """Reference of --protocol repa.

    Args:
        reference: encoder of the same images: timm:NAME, timm:NAME=FILE, a checkpoint of an encoder, or raw pixels,
            pixels:32x32x3.
        reference_size: side of the images that a timm model sees; checkpoints have their own.
        alignment_images: largest number of test images whose neighbours are compared, a fixed random choice; REPA uses
            10000.
    """

    reference: Path = Path("timm:vit_large_patch14_dinov2.lvd142m")
    reference_size: Annotated[int, Bounds(1, 4096)] = 224
    alignment_images: Annotated[int, Bounds(12, 2**31)] = 2000

    @property
    def name(self) -> str:
        """The numbers that are not the defaults, for file names."""
        return name_changes(self, "reference")


@check_types
@dataclass(frozen=True, kw_only=True)
class Classification(ProtocolOptions):
    """Protocols.

    Args:
        protocol: what to compute: some of in100-linear, logistic, knn, few-shot-1, few-shot-5, few-shot-10,
            and protocols that a module of --trust registers.
        pool: mean of patch tokens, of all tokens, or the class token; default: the protocol's, all for in100-linear
            and logistic, otherwise mean.
        layer: number or name; default: the last of an encoder, the middle of a denoiser.
        time: noise level in (0, 1), for a denoiser; default: 0.1. Encoders see clean images.
        norm: apply the network's final layer norm before pooling.
        epochs: of in100-linear.
        temperature: T of the votes exp(similarity / T) of nearest neighbours.
        draws: of the few shots.
        seed: of noise, draws, initial weights and order.
    """

    NEEDS = {
        "epochs": Needs("protocol", unless=("logistic", "knn", *FEW_SHOTS)),
        "neighbours": Needs("protocol", unless=("in100-linear", "logistic", *FEW_SHOTS)),
        "uniform": Needs("protocol", unless=("in100-linear", "logistic", *FEW_SHOTS)),
        "draws": Needs("protocol", unless=("in100-linear", "logistic", "knn")),
        "temperature": [Needs("protocol", "knn"), Needs("uniform", False)],
    }
    protocol: tuple[str, ...] = ("in100-linear", "logistic", "knn")
    layer: str | None = None
    time: Annotated[float | None, Within("(0, 1)")] = None
    norm: bool = False
    epochs: Epochs = 200
    temperature: Annotated[float, Within("(0, inf)")] = 0.07


@check_types
@dataclass(frozen=True, kw_only=True)
class Reconstruction(LoadingOptions):
    """Reconstructions of masked images.

    Args:
        ckpt: a .ckpt or .safetensors of a masked autoencoder.
        images: folder, zip, tar, .npz or data set, such as digits:test.
        num: number of images, a fixed random choice.
        mask_ratio: share of the patches that are removed, in (0, 1).
        seed: of the masks.
        batch_size: images at a time.
        out: picture, a .png.
    """

    ckpt: Path
    images: Annotated[str, "--pictures"]
    num: Annotated[int, Bounds(1, LARGEST_GRID)] = 16
    mask_ratio: Annotated[float, Within("(0, 1)")] = 0.75
    seed: Seed = 0
    batch_size: Count = 64
    out: Path = Path("reconstructions.png")
