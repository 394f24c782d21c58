"""Feature extractors for metrics: uint8 images to float32 features and class logits, independent of global settings.

n = images, d = features, k = classes. An extractor is a class, and an entry of EXTRACTORS in
`uvit_decay/evaluation/feature_table.py` if commands may name it; docs/extending.md shows how to add one. Libraries are
imported at first use: parsers of options import this module.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from einops import repeat
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor, nn

from uvit_decay.images.io import to_float
from uvit_decay.metrics import resize
from uvit_decay.runtime.distributed import cpu_threads
from uvit_decay.runtime.errors import UserError, check_whole
from uvit_decay.runtime.precision import Precision, chosen_precision, computing
from uvit_decay.runtime.random import generator
from uvit_decay.runtime.typed import check_types
from uvit_decay.runtime.validation import check_compile

if TYPE_CHECKING:
    from uvit_decay.metrics.inception_net import InceptionV3

UInt8Images = UInt8[Tensor, "n c h w"]
Labels = Int64[Tensor, " n"]
TrainingSet = Callable[[], tuple[Tensor, Tensor, tuple[str, ...] | None]]  # reads images, labels, names of classes
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
    """

    name: str
    widths: dict[str, int]
    channels: int | None = 3
    needs_labels = False
    class_names: tuple[str, ...] | None = None
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
            from uvit_decay.metrics.inception_net import InceptionV3, weights_file
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
        from uvit_decay.metrics.inception_net import locate_cached_weights

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


STEPS, PASSES = 300, 14  # of the small classifier; the digits have 300 steps by either rule


@check_types
class SmallClassifier(Extractor):
    """Small convolutional network, trained in seconds on the training set: 64 features, logits of the data's classes.

    It is for images unlike Inception's training data, such as the 8x8 digits, where its test accuracy is 0.997.
    Distances are comparable only for the same training set.

    Args:
        steps: training steps, of 64 images each, on the CPU; null: 300, but at most 14 passes over the images.
    """

    name = "small-cnn"
    needs_labels = True

    def __init__(self, steps: int | None = STEPS) -> None:
        check_whole(1, steps=STEPS if steps is None else steps)
        self.steps = steps
        self.channels = None
        self.widths = {"features": 64, "logits": 0}  # `prepare` sets the number of classes
        self.net: nn.Sequential | None = None

    def prepare(self, images: UInt8Images, labels: Labels, device: torch.device) -> None:
        if self.net is None:
            self.channels = images.shape[1]
            self.widths["logits"] = int(labels.max()) + 1
            # Equal at each call, independent of the global random state and modes.
            with (
                torch.random.fork_rng(devices=()),  # it trains on the CPU; the states of GPUs stay as they are
                torch.enable_grad(),
                torch.inference_mode(False),
                computing(images.device, "float32"),
                cpu_threads(1),  # the rounding of sums depends on the number of threads
            ):
                torch.default_generator.manual_seed(0)
                self.net = self._train(images, labels)
            weights = [tensor.cpu().numpy().tobytes() for tensor in self.net.state_dict().values()]
            self.sha256 = hashlib.sha256(b"".join(weights)).hexdigest()
        self.net.to(device)

    def steps_on(self, images: int) -> int:
        """Return the number of training steps on this number of images."""
        if self.steps is not None:
            return self.steps
        return min(STEPS, math.ceil(PASSES * images / 64))

    def _train(self, images: Tensor, labels: Tensor) -> nn.Sequential:
        """Return the network trained on these images, in eval mode."""
        net = self._network()
        optimizer = torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=0.05)
        steps = self.steps_on(len(images))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        random = generator("small classifier")
        for _ in range(steps):
            chosen = torch.randint(len(images), (64,), generator=random)
            logits = net(to_float(images[chosen]))
            loss = nn.functional.cross_entropy(logits, labels[chosen], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return net.eval().requires_grad_(False)

    def _network(self) -> nn.Sequential:
        def block(c_in: int, c_out: int) -> tuple[nn.Module, ...]:
            return nn.Conv2d(c_in, c_out, 3, padding=1), nn.BatchNorm2d(c_out), nn.ReLU()

        layers = [*block(self.channels, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 64)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, self.widths["logits"]))

    def extract(self, images: UInt8Images) -> Features:
        features = self.net[:-1](to_float(images))
        return Features(features, self.net[-1](features))


def prepare(extractor: Extractor, shape: tuple[int, ...], device: torch.device, training_set: TrainingSet) -> None:
    """Prepare an extractor for images of this `shape` (c, h, w); `training_set` is read only if it needs labels."""
    if extractor.needs_labels:
        images, labels, extractor.class_names = training_set()
    else:
        images = torch.zeros(0, *shape, dtype=torch.uint8)
        labels = torch.zeros(0, dtype=torch.int64)
    extractor.prepare(images, labels, device)
