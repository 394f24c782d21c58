"""Feature extractors for metrics: uint8 images to float32 features and class logits, independent of global settings.

n = images, d = features, k = classes. An extractor is a class, and an entry of EXTRACTORS in
`uvit_decay/encoders/table.py` if commands may name it; docs/extending.md shows how to add one. Libraries are
imported at first use: parsers of options import this module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from einops import repeat
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from uvit_decay.encoders import resize
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.precision import Precision, chosen_precision, computing
from uvit_decay.runtime.typed import check_types
from uvit_decay.runtime.validation import check_compile

if TYPE_CHECKING:
    from uvit_decay.encoders.inception_net import InceptionV3

UInt8Images = UInt8[Tensor, "n c h w"]
Labels = Int64[Tensor, " n"]
PUBLISHED = "6726825d"  # start of the sha256 of the Inception weights behind all published numbers
_AT_ONCE = 16  # images in a batch of Inception on a CPU: as many as fit its caches; 256 would take gigabytes


class Features(NamedTuple):
    """Output of an extractor for n images, float32 on their device; `spatial` has the features of sFID."""

    features: Float32[Tensor, "n d"]
    logits: Float32[Tensor, "n k"] | None = None
    spatial: Float32[Tensor, "n s"] | None = None


class Extractor(ABC):
    """Feature extractor (abstract); the attributes are final after `prepare`.

    Attributes:
        name: part of the key of every metric.
        widths: number of values per image of each output, by the field names of `Features`.
        channels: number of image channels; None means the number of the training set.
        needs_labels: whether it is trained on the images of a data set; its logits are then for their classes.
        tf32: whether products of float32 numbers are rounded to tf32.
        class_names: names of the classes of its logits, with which the labels of samples are compared (label
            consistency); None if they are not compared.
        family: decides the names of the distances: FID and KID (inception), FDD and KDD (dinov2), or FD and KID.
        sha256: SHA-256 of the weights.
        accuracy: share of held-out training images that it assigns to their class; None if that is not known.
    """

    name: str
    widths: dict[str, int]
    channels: int | None = 3
    needs_labels = False
    class_names: tuple[str, ...] | None = None
    accuracy: float | None = None
    tf32 = False
    family: Literal["inception", "dinov2", "other"] = "other"
    sha256: str

    @abstractmethod
    def prepare(self, images: UInt8Images, labels: Labels, device: torch.device) -> None:
        """Load or train on the training set `images`, `labels`, and move to `device`; later calls cost nothing."""

    @abstractmethod
    def extract(self, images: UInt8Images) -> Features:
        """Return the features of images on the device; called without autocast and without gradients."""

    @torch.no_grad()
    def __call__(self, images: UInt8Images) -> Features:
        """Return the features of images on the device, independent of the surrounding precision settings."""
        with computing(images.device, "tf32" if self.tf32 else "float32"):
            return self.extract(images)

    def fingerprint(self) -> str:
        """Return the name and the start of the weights' SHA-256; metrics with equal fingerprints are comparable."""
        return f"{self.name}-{self.sha256[:12]}"

    def remark(self) -> str | None:
        """Return a caveat for readers of metrics on these features, or None."""
        return f"features of {self.name}, not Inception's: no FID of papers compares"

    def describe(self) -> dict[str, Any]:
        """Return further metadata for reports, as plain values: what is not known from the name."""
        return {}

    def missing(self) -> str | None:
        """Return the weights that `prepare` would have to download, in words, or None."""
        return None

    def rgb(self, images: UInt8Images) -> UInt8[Tensor, "n 3 h w"]:
        """Return RGB images, with grey images repeated; raise a UserError for other numbers of channels."""
        channels = images.shape[1]
        if channels == 3:
            return images
        if channels == 1:
            return repeat(images, "n 1 h w -> n c h w", c=3)
        raise UserError(f"{self.name} takes RGB or grey images, these have {channels} channels")


class TrainedExtractor(Extractor):
    """Extractor that is trained on the images of a data set, and whose weights are stored (abstract)."""

    needs_labels = True

    @abstractmethod
    def recipe(self) -> dict[str, Any]:
        """Return, as plain values, everything besides images and labels that the weights depend on."""

    @abstractmethod
    def fit(self, images: UInt8Images, labels: Labels) -> None:
        """Train on images and labels on the CPU, which may have had an earlier training."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return the result of the training, on the CPU."""

    @abstractmethod
    def load(self, state: dict[str, Tensor]) -> None:
        """Take the `state` of a training, so that `prepare` only moves it to the device."""

    def shrink(self, images: UInt8Images) -> UInt8Images:
        """Return images in the size in which `fit` needs them, so that a large set fits into memory."""
        return images


@check_types
class Inception(Extractor):
    """The TensorFlow Inception-v3 of 2015-12-05 in torch-fidelity's port: 2048 features after pool 3, 1008 logits.

    Grey images are repeated to RGB. FID is comparable only between equal protocols, which differ in the resizing to
    299x299: `pytorch-fid` (U-ViT's numbers) bilinear between pixel centres, `adm` (SiT's, ADM's, torch-fidelity's) as
    in TensorFlow 1, `clean` (clean-fid) Pillow's antialiased bicubic.

    Args:
        weights: path of the weights file; null means the file in torch's cache, downloaded (96 MB) if missing.
        protocol: method of resizing.
        spatial: also return the 2023 spatial features of sFID.
        compile: compile the network with torch.compile: true, or the name of a backend.
        precision: precision of the convolutions, part of the name unless it is float32, as in published numbers.
    """

    family = "inception"

    def __init__(
        self,
        weights: str | Path | None = None,
        protocol: resize.Protocol = "pytorch-fid",
        spatial: bool = False,
        compile: bool | str = False,
        precision: Precision = "float32",
    ) -> None:
        if weights is not None and not Path(weights).is_file():
            raise UserError(f"the Inception weights {weights} do not exist")
        check_compile(compile)
        self.weights = None if weights is None else str(weights)
        self.protocol = protocol
        self.spatial = spatial
        self.compile = compile
        self.precision = precision
        self.tf32 = precision == "tf32"
        self.name = f"inception-v3-{protocol}"
        if precision != "float32":
            self.name += f"-{precision}"
        self.widths = {"features": 2048, "logits": 1008}
        if spatial:
            self.widths["spatial"] = 2023
        self.net: InceptionV3 | None = None

    def prepare(self, images: UInt8Images, labels: Labels, device: torch.device) -> None:
        chosen_precision(self.precision, device)  # a UserError for one that the device lacks
        if self.net is None:
            from uvit_decay.encoders.inception_net import InceptionV3, weights_file
            from uvit_decay.runtime.download import checksum

            path = weights_file(self.weights)
            net = InceptionV3(path, self.protocol, self.spatial, narrow=self.precision == "bf16")
            self.sha256 = checksum(path)
            if self.compile:
                backend = "inductor" if self.compile is True else self.compile
                net.compile(backend=backend)
            self.net = net
        self.net.place(device)

    def extract(self, images: UInt8Images) -> Features:
        at_once = _AT_ONCE if images.device.type == "cpu" else max(len(images), 1)
        outputs = [self.net(part) for part in self.rgb(images).split(at_once)]
        features, logits, spatial = zip(*outputs, strict=True)
        joined = Features(torch.cat(features), torch.cat(logits))
        if self.spatial:
            joined = joined._replace(spatial=torch.cat(spatial))
        return joined

    def missing(self) -> str | None:
        from uvit_decay.encoders.inception_net import locate_cached_weights

        cached = locate_cached_weights()
        if self.weights is not None or cached.exists():
            return None
        return f"Inception's weights ({cached})"

    def remark(self) -> str | None:
        if not self.sha256.startswith(PUBLISHED):
            return "these Inception weights are not the published ones: the numbers compare with nothing else"
        if self.precision != "float32":
            return f"features in {self.precision}; papers compute them in float32"
        return None
