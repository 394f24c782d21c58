"""Feature extractors for metrics: uint8 images to float32 features and class logits, independent of global settings.

n = images, d = features, k = classes. An extractor is a class, and an entry of EXTRACTORS in
`uvit_decay/encoders/table.py` if commands may name it; docs/extending.md shows how to add one. Libraries are
imported at first use: parsers of options import this module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from einops import repeat
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor, nn

from uvit_decay.files.validation import check_compile
from uvit_decay.runtime.precision import Precision, chosen_precision, computing

UInt8Images = UInt8[Tensor, "n c h w"]
Labels = Int64[Tensor, " n"]


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
        at_once: images in a batch on a CPU, as many as fit its caches; None: all images of a call.
        accuracy: share of held-out training images that it assigns to their class; None if that is not known.
    """

    name: str
    widths: dict[str, int]
    channels: int | None = 3
    needs_labels = False
    class_names: tuple[str, ...] | None = None
    accuracy: float | None = None
    tf32 = False
    at_once: int | None = None
    family: Literal["inception", "dinov2", "other"] = "other"
    sha256: str

    @abstractmethod
    def prepare(self, images: UInt8Images, labels: Labels, device: torch.device) -> None:
        """Load or train on the training set `images`, `labels`, and move to `device`; later calls cost nothing."""

    @abstractmethod
    def extract(self, images: UInt8Images) -> Features:
        """Return the features of a batch of images on the device; called without autocast and without gradients."""

    @torch.no_grad()
    def __call__(self, images: UInt8Images) -> Features:
        """Return the features of images on the device, independent of the surrounding precision settings."""
        size = max(len(images), 1)
        if self.at_once is not None and images.device.type == "cpu":
            size = self.at_once
        with computing(images.device, "tf32" if self.tf32 else "float32"):
            parts = [self.extract(part) for part in images.split(size)]
        if len(parts) == 1:
            return parts[0]
        joined = {}
        for name in Features._fields:
            tensors = [getattr(part, name) for part in parts]
            if tensors[0] is not None:
                joined[name] = torch.cat(tensors)
        return Features(**joined)

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
        """Return RGB images, with grey images repeated."""
        if images.shape[1] == 3:
            return images
        return repeat(images, "n 1 h w -> n c h w", c=3)


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


class Pretrained(Extractor):
    """Extractor of published weights in a file (abstract).

    Args:
        weights: path of the file; None for the file of the cache, which `open` downloads if it is missing.
        compile: compile the network with torch.compile: true, or the name of a backend.
        precision: precision of the network.
    """

    at_once = 16

    def __init__(self, weights: str | Path | None, compile: bool | str, precision: Precision) -> None:
        check_compile(compile)
        self.weights = None if weights is None else str(weights)
        self.compile = compile
        self.precision = precision
        self.tf32 = precision == "tf32"
        self.net: nn.Module | None = None

    @abstractmethod
    def open(self) -> nn.Module:
        """Return the network with its weights, and set `sha256`."""

    def prepare(self, images: UInt8Images, labels: Labels, device: torch.device) -> None:
        chosen_precision(self.precision, device)  # a UserError for one that the device lacks
        if self.net is None:
            net = self.open()
            if self.compile:
                net.compile(backend="inductor" if self.compile is True else self.compile)
            self.net = net
        self.net.to(device)
