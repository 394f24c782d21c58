"""Options of evaluations, as groups of a command line; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from uvit_decay.runtime.command_line import Bounds, check_bounds
from uvit_decay.sampling_options import MOST_IMAGES, Count, PrecisionOption, Seed

if TYPE_CHECKING:
    from uvit_decay.metrics.extractors import Extractor


@dataclass(frozen=True)
class LikelihoodOptions:
    """Options of log-likelihoods.

    Args:
        solver: heun takes equal steps; dopri5 chooses its steps, for one image at a time.
        steps: steps of heun, with two evaluations and two gradients of the network each.
        labels: own, the label of each image, for class-conditional networks; or null, the label "no class".
        num: images at most, a fixed random choice.
        seed: of the noise within grey levels and of the random signs.
        batch_size: images at a time; changes no number but its rounding.
        precision: of the network; default: tf32 on CUDA GPUs, float32 elsewhere.
    """

    solver: Literal["heun", "dopri5"] = "heun"
    steps: Annotated[int, Bounds(1, 100_000)] = 500
    labels: Literal["own", "null"] = "own"
    num: Annotated[int, Bounds(2, MOST_IMAGES)] = 1000
    seed: Seed = 0
    batch_size: Count = 64
    precision: PrecisionOption | None = None

    def __post_init__(self) -> None:
        check_bounds(type(self), vars(self))


@dataclass(frozen=True)
class FeatureOptions:
    """Features in which images are compared.

    Args:
        features: an extractor by its name, such as inception or digits, or a TorchScript or .pt2 file.
        protocol: how Inception's images are resized: pytorch-fid as U-ViT, adm as SiT.
        inception_weights: the file that torch-fidelity uses; default: torch's cache, or download.
        image_size: crop images of files to this size, as ADM does.
        compile: torch.compile for Inception, and for the network of --ckpt.
        feature_precision: of Inception; bf16 and tf32 are faster, but numbers of papers are in float32.
    """

    features: str = "inception"
    protocol: Literal["pytorch-fid", "adm", "clean"] = "pytorch-fid"
    inception_weights: str | None = None
    image_size: Annotated[int, Bounds(1, 2**16)] | None = None
    compile: bool = False
    feature_precision: PrecisionOption = "float32"

    def extractor(self, spatial: bool) -> Extractor:
        """Return the extractor, not yet loaded, which yields `spatial` features, too, if it can."""
        from uvit_decay.metrics.extractors import ExtractorOptions, create_extractor

        inception = (self.inception_weights, self.protocol, spatial, self.compile, self.feature_precision)
        return create_extractor(self.features, ExtractorOptions(*inception))
