"""The tables of features: a protocol is one entry of RESIZINGS, an extractor one of EXTRACTORS, or a network in a file.

Commands and their help read the tables; docs/extending.md shows how to add an entry. Extractors are imported by the
functions that create them, so that --help needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from uvit_decay.generation.options import TIMM, PrecisionOption
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Bounds, check_types

if TYPE_CHECKING:
    from uvit_decay.encoders.extractors import Extractor


# Protocols, which are ways to resize images for an extractor, and their extractors. The name of the protocol is part of
# the name of every value. The first protocol of an extractor is its default; the first of all is the commands' default.
RESIZINGS = {
    "pytorch-fid": "inception",
    "adm": "inception",
    "clean": "inception",
    "dinov2-edm2": "dinov2",
    "dinov2-dgm": "dinov2",
}


DIGITS = "digits"  # the small classifier of the training digits
SMALL_CNN = "small-cnn"  # the small classifier of the reference's labelled images, as in training: its present version
CHECKPOINTS = (".ckpt", ".safetensors")


class ExtractorRequest(NamedTuple):
    """Request of a command for an extractor.

    Args:
        options: the options.
        protocol: name of the protocol; None if the extractor has no protocols.
        spatial: whether spatial features are needed.
        trusted: classes or modules that a file may name.
    """

    options: FeatureOptions
    protocol: str | None
    spatial: bool
    trusted: Sequence[str] = ()


def _inception(request: ExtractorRequest) -> Extractor:
    from uvit_decay.encoders import Inception

    options = request.options
    return Inception(
        options.inception_weights, request.protocol, request.spatial, options.compile, options.feature_precision
    )


def _small_cnn(request: ExtractorRequest) -> Extractor:
    from uvit_decay.encoders import SmallClassifier

    return SmallClassifier()


def _dinov2(request: ExtractorRequest) -> Extractor:
    from uvit_decay.encoders import DINOv2

    options = request.options
    return DINOv2(options.dinov2_weights, request.protocol, options.compile, options.feature_precision)


EXTRACTORS: dict[str, Callable[[ExtractorRequest], Extractor]] = {
    "inception": _inception,
    DIGITS: _small_cnn,
    SMALL_CNN: _small_cnn,
    "dinov2": _dinov2,
}


@check_types
@dataclass(frozen=True)
class FeatureOptions:
    """Features in which images are compared.

    Args:
        features: an extractor, one of inception, digits, small-cnn, dinov2; or a network: the .ckpt or .safetensors of
            an encoder or classifier, timm:NAME=FILE, or timm:NAME with pretrained weights; default: the protocol's.
        protocol: pytorch-fid, adm, clean, dinov2-edm2, dinov2-dgm: how images are resized for inception or dinov2, as
            docs/evaluation.md says; other features ignore it; default: pytorch-fid, or the first of --features.
        inception_weights: the file that torch-fidelity uses; default: torch's cache, or download.
        dinov2_weights: a file of timm or facebookresearch/dinov2; default: timm's in the cache, or download.
        image_size: crop images of files to this size, as ADM does.
        compile: torch.compile for Inception or DINOv2, and for the network of --ckpt.
        feature_precision: of Inception and DINOv2; bf16 and tf32 are faster, but papers report values in float32.
    """

    features: str | None = None
    protocol: str | None = None
    inception_weights: str | None = None
    dinov2_weights: str | None = None
    image_size: Annotated[int, Bounds(1, 2**16)] | None = None
    compile: bool = False
    feature_precision: PrecisionOption = "float32"

    def __post_init__(self) -> None:
        if self.protocol not in (None, *RESIZINGS):
            raise UserError(f"choose one of {', '.join(RESIZINGS)}, got {self.protocol!r}", argument="protocol")
        own = self._own_protocols()
        if self.protocol is not None and own and self.protocol not in own:
            known = ", ".join(own)
            raise UserError(f"features {self.name} have no {self.protocol}; choose {known}", argument="protocol")
        if not own and self.feature_precision != "float32":
            raise UserError(f"features {self.name} are in float32; leave it out", argument="feature_precision")

    @property
    def name(self) -> str:
        """Name of the extractor: `features`, or the protocol's extractor."""
        if self.features:
            return self.features
        return RESIZINGS[self.protocol or next(iter(RESIZINGS))]

    def _own_protocols(self) -> list[str]:
        """Return the protocols of the extractor; an extractor without protocols ignores `protocol`."""
        return [name for name, features in RESIZINGS.items() if features == self.name]

    @property
    def is_network(self) -> bool:
        """True if the extractor is a network in a file, or a model of timm, and not in the table."""
        if self.name in EXTRACTORS:
            return False
        return self.name.startswith(TIMM) or self.name.endswith(CHECKPOINTS)

    @property
    def has_ceiling(self) -> bool:
        """True if the values of the reference's test images stand beside the samples' by default."""
        return self.is_network or self.name == SMALL_CNN

    @property
    def on_white(self) -> bool:
        """False if transparency of image files is dropped, as the tools of the named protocols do."""
        return not self._own_protocols()

    @property
    def files(self) -> list[Path]:
        """The file of the network, if the extractor has one."""
        file = self.name
        if file.startswith(TIMM):
            file = file.partition("=")[2]
        return [Path(file)] if self.is_network and file else []

    def extractor(self, spatial: bool, trusted: Sequence[str] = ()) -> Extractor:
        """Return the extractor with `spatial` features if it can yield them; only a network in a file is loaded.

        Args:
            spatial: whether spatial features are needed.
            trusted: classes or modules that a file may name.
        """
        if self.is_network:
            from uvit_decay.encoders.network_features import NetworkFeatures

            return NetworkFeatures(self.name, trusted)
        if self.name not in EXTRACTORS:
            known = f"{', '.join(EXTRACTORS)}, a .ckpt, a .safetensors or timm:NAME=FILE"
            hint = "for another network write an Extractor (docs/extending.md)"
            raise UserError(f"choose one of {known}, got {self.name}; {hint}", argument="features")
        own = self._own_protocols()
        protocol = None
        if own:
            protocol = self.protocol or own[0]
        return EXTRACTORS[self.name](ExtractorRequest(self, protocol, spatial, trusted))
