"""Feature extractors for metrics: uint8 images to float32 features and class logits, independent of global settings.

n = images, d = features, k = classes. Networks and their libraries are imported at first use, since the parsers of
command-line options import this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from einops import repeat
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor, nn

from uvit_decay.image_io import to_float
from uvit_decay.metrics import resize
from uvit_decay.runtime.errors import UserError, check_whole, one_line
from uvit_decay.runtime.precision import full_float32
from uvit_decay.runtime.random import generator

if TYPE_CHECKING:
    from uvit_decay.metrics.inception_net import InceptionV3

UInt8Images = UInt8[Tensor, "n c h w"]
_AT_ONCE = 16  # images in a batch of Inception on a CPU: as many as fit its caches; 256 would take gigabytes


class Features(NamedTuple):
    """Output of an extractor for n images, float32 on their device; `spatial` are the features of sFID."""

    features: Float32[Tensor, "n d"]
    logits: Float32[Tensor, "n k"] | None
    spatial: Float32[Tensor, "n 2023"] | None = None


@runtime_checkable
class Extractor(Protocol):
    """Interface of feature extractors; the attributes are final after `prepare`.

    `name` is part of the key of every metric, `dim` is d, `channels` is the number of image channels, None if the data
    set decides it. `knows_labels` means that the k classes are those of the data set, `has_logits` that there are any.
    """

    name: str
    dim: int
    channels: int | None
    knows_labels: bool
    has_logits: bool

    def prepare(self, images: UInt8Images, labels: Int64[Tensor, " n"], device: torch.device) -> None:
        """Load or train on the training set `images`, `labels`, and move to `device`; later calls cost nothing."""

    def fingerprint(self) -> str:
        """Return the fingerprint: the name and the start of the weights' SHA-256, after `prepare`.

        Metrics are comparable only between equal fingerprints.
        """

    def __call__(self, images: UInt8Images) -> Features: ...


def load(extractor: Extractor, shape: tuple[int, ...], device: torch.device) -> None:
    """Prepare an extractor that needs no training set, for images of this `shape` (c, h, w)."""
    extractor.prepare(torch.zeros(0, *shape, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), device)


class Inception:
    """The TensorFlow Inception-v3 of 2015-12-05 in torch-fidelity's port: 2048 features after pool 3, 1008 logits.

    Grey images are repeated to RGB. FID is comparable only between equal protocols, which differ in the resizing to
    299x299: `pytorch-fid` (U-ViT's numbers) bilinear between pixel centres, `adm` (SiT's, ADM's, torch-fidelity's) as
    in TensorFlow 1, `clean` (clean-fid) Pillow's antialiased bicubic.

    Args:
        weights: path of the weights file; null means the file in torch's cache, downloaded (96 MB) if missing.
        protocol: how images are resized.
        spatial: return the 2023 spatial features of sFID, too.
        compile: compile the network with torch.compile: true, or the name of a backend.

    Raises:
        UserError: the file is missing, damaged or has another layout, or it cannot be downloaded.
    """

    dim, channels, knows_labels, has_logits = 2048, 3, False, True

    def __init__(
        self,
        weights: str | None = None,
        protocol: resize.Protocol = "pytorch-fid",
        spatial: bool = False,
        compile: bool | str = False,
    ) -> None:
        if weights is not None and not Path(weights).is_file():
            raise UserError(f"the Inception weights {weights} do not exist")
        self.weights, self.protocol, self.spatial, self.compile = weights, protocol, spatial, compile
        self.name = f"inception-v3-{protocol}"
        self.net: InceptionV3 | None = None

    def prepare(self, images: UInt8Images, labels: Int64[Tensor, " n"], device: torch.device) -> None:
        if self.net is None:
            from uvit_decay.metrics.inception_net import InceptionV3, weights_file
            from uvit_decay.runtime.download import checksum

            path = weights_file(self.weights)
            net = InceptionV3(path, self.protocol, self.spatial)
            self._sha256 = checksum(path)
            if self.compile:
                net.compile(backend="inductor" if self.compile is True else self.compile)
            self.net = net
        self.net.place(device)

    def fingerprint(self) -> str:
        return f"{self.name}-{self._sha256[:12]}"

    @torch.no_grad()
    def __call__(self, images: UInt8Images) -> Features:
        at_once = _AT_ONCE if images.device.type == "cpu" else max(len(images), 1)
        with full_float32(images.device):
            parts = zip(*(self.net(part) for part in _rgb(images, self.name).split(at_once)), strict=True)
            return Features(*(None if part[0] is None else torch.cat(part) for part in parts))


def _rgb(images: Tensor, who: str) -> Tensor:
    """Return RGB images, grey ones repeated; raise a UserError that names the extractor for other channel counts."""
    if images.shape[1] not in (1, 3):
        raise UserError(f"{who} takes RGB or grey images, these have {images.shape[1]} channels")
    return repeat(images, "n 1 h w -> n c h w", c=3) if images.shape[1] == 1 else images


class SmallClassifier:
    """A small convolutional network trained in seconds on the training set: 64 features, the classes of the data.

    For images unlike Inception's training data, such as the 8x8 digits, where its test accuracy is 0.997. Distances
    are comparable only for the same training set.

    Args:
        steps: training steps, of 64 images each, on the CPU.
    """

    name, dim, knows_labels, has_logits = "small-cnn", 64, True, True

    def __init__(self, steps: int = 300) -> None:
        check_whole(1, steps=steps)
        self.steps = steps
        self.channels: int | None = None
        self.net: nn.Sequential | None = None

    def prepare(self, images: UInt8Images, labels: Int64[Tensor, " n"], device: torch.device) -> None:
        if self.net is None:
            from uvit_decay.metrics.small_classifier import train

            self.net, self.channels = train(images, labels, self.dim, self.steps), images.shape[1]
            self._sha256 = _sha256(self.net.state_dict().values())
        self.net.to(device)

    def fingerprint(self) -> str:
        return f"{self.name}-{self._sha256[:12]}"

    @torch.no_grad()
    def __call__(self, images: UInt8Images) -> Features:
        with full_float32(images.device):
            features = self.net[:-1](to_float(images))
            return Features(features, self.net[-1](features))


def _sha256(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 of the bytes of the tensors, in order, in hexadecimal."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.cpu().numpy().tobytes())
    return found.hexdigest()


class CustomExtractor:
    """A user-provided network: a TorchScript archive (as clean-fid's and StyleGAN's) or a .pt2 file of torch.export.

    It maps uint8 (n, 3, h, w) to float features (n, d), or to a pair of those and logits (n, k). Such a file is a
    program: load trusted files only.

    Args:
        path: path of the file.

    Raises:
        UserError: the file is missing or has another format, or its output is of another kind or not finite.
    """

    channels, knows_labels = 3, False

    def __init__(self, path: str) -> None:
        if not Path(path).is_file():
            raise UserError(f"the feature extractor {path} does not exist")
        self.path = Path(path)
        self.name, self.dim, self.has_logits = self.path.name, 0, False
        self._program, self._device = None, None

    def prepare(self, images: UInt8Images, labels: Int64[Tensor, " n"], device: torch.device) -> None:
        if self._device == device:
            return
        from uvit_decay.metrics.custom import load
        from uvit_decay.runtime.download import checksum

        self._program, self._device, self._sha256 = load(self.path, device), device, checksum(self.path)
        size = [max(length, 1) for length in images.shape[2:]]
        trial = torch.randint(256, (2, 3, *size), dtype=torch.uint8, generator=generator("custom extractor"))
        try:
            found = self(trial.to(device))
        except UserError:
            raise
        except Exception as error:  # any type: the user's program may raise anything
            raise UserError(f"{self.path} cannot take {tuple(trial.shape)} images: {one_line(error)}") from error
        self.dim, self.has_logits = found.features.shape[1], found.logits is not None

    def fingerprint(self) -> str:
        return f"{self.name}-{self._sha256[:12]}"

    @torch.no_grad()
    def __call__(self, images: UInt8Images) -> Features:
        from uvit_decay.metrics.custom import read_output

        with full_float32(images.device):
            output = self._program(_rgb(images, self.name))
        return Features(*read_output(output, len(images), self.path))
