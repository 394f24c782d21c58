"""Feature extractors for metrics: uint8 pictures to features and class logits, in float32 whatever is around.

n = pictures, d = features, k = classes.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from einops import repeat
from jaxtyping import Int64, UInt8
from torch import Tensor, nn

from uvit_decay.errors import UserError, one_line
from uvit_decay.image import to_float
from uvit_decay.randomness import generator

Pictures = UInt8[Tensor, "n c h w"]


class Features(NamedTuple):
    """What an extractor says of pictures: features (n, d) and logits (n, k), float32."""

    features: Tensor
    logits: Tensor


class Extractor(Protocol):
    """`name` goes into every number's key; `knows_labels` if its k classes are those of the data."""

    name: str
    dim: int
    knows_labels: bool

    def prepare(self, images: Pictures, labels: Int64[Tensor, " n"], device: torch.device) -> None:
        """Get ready on `device`; the data are the training set. May be called again, and then costs nothing."""

    def __call__(self, images: Pictures) -> Features: ...


class Inception:
    """torch-fidelity's port of the TensorFlow Inception-v3 (pt_inception-2015-12-05), 2048 features after pool 3.

    Pictures are resized to 299x299 as TensorFlow 1 did (the `adm` protocol). FID compares only among equal protocols.

    Args:
        weights: path of the weights file; null downloads it, 96 MB, to torch's cache at first use.

    Raises:
        UserError: the file is missing or has another layout, or it cannot be downloaded.
    """

    name, dim, knows_labels = "inception-v3-adm", 2048, False

    def __init__(self, weights: str | None = None) -> None:
        if weights is not None and not Path(weights).is_file():
            raise UserError(f"the Inception weights {weights} do not exist")
        self.weights = weights
        self.net: nn.Module | None = None

    def prepare(self, images: Pictures, labels: Int64[Tensor, " n"], device: torch.device) -> None:
        if self.net is None:
            self.net = self._load()
        self.net.to(device)

    def _load(self) -> nn.Module:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        if self.weights is not None:
            _check_state_dict(self.weights)
        features = ["2048", "logits_unbiased"]
        try:
            return FeatureExtractorInceptionV3("inception-v3-compat", features, self.weights).eval()
        except (OSError, RuntimeError, KeyError, AttributeError) as error:
            reason = one_line(error)
            if self.weights is not None:
                raise UserError(f"{self.weights} does not hold torch-fidelity's Inception weights: {reason}") from error
            raise UserError(
                f"the Inception weights cannot be downloaded ({reason}): fetch "
                "weights-inception-2015-12-05-6726825d.pth from torch-fidelity's releases where there is a network, "
                "and name it in the extractor's init_args.weights"
            ) from error

    @torch.no_grad()
    def __call__(self, images: Pictures) -> Features:
        rgb = repeat(images, "n 1 h w -> n c h w", c=3) if images.shape[1] == 1 else images
        with torch.autocast(images.device.type, enabled=False):
            return Features(*self.net(rgb))


def _check_state_dict(path: str) -> None:
    """torch-fidelity would run what a pickle contains; only tensors get past this."""
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise UserError(f"the Inception weights {path} cannot be read: {one_line(error)}") from error
    if not isinstance(contents, dict):
        raise UserError(f"the Inception weights {path} are no state_dict but a {type(contents).__name__}")


class SmallClassifier:
    """A small convolutional network trained in seconds on the training set: 64 features, the data's own classes.

    For pictures that Inception was not made for, such as the 8x8 digits, where its test accuracy is 0.997. Distances
    compare only with those of the same training set.

    Args:
        steps: training steps, of 64 pictures each, on the CPU.
    """

    name, dim, knows_labels = "small-cnn", 64, True

    def __init__(self, steps: int = 300) -> None:
        self.steps = steps
        self.net: nn.Module | None = None

    def prepare(self, images: Pictures, labels: Int64[Tensor, " n"], device: torch.device) -> None:
        if self.net is None:
            with torch.random.fork_rng(), torch.enable_grad(), torch.inference_mode(False):
                torch.manual_seed(0)
                with torch.autocast("cpu", enabled=False):
                    self.net = self._train(images, labels)
        self.net.to(device)

    def _train(self, images: Tensor, labels: Tensor) -> nn.Module:
        net = _small_cnn(images.shape[1], self.dim, int(labels.max()) + 1)
        optimizer = torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=self.steps)
        for chosen in self._batches(len(images)):
            x = to_float(images[chosen])
            loss = nn.functional.cross_entropy(net(x), labels[chosen], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return net.eval().requires_grad_(False)

    def _batches(self, n: int) -> Iterator[Tensor]:
        random = generator("small classifier")
        for _ in range(self.steps):
            yield torch.randint(n, (64,), generator=random)

    @torch.no_grad()
    def __call__(self, images: Pictures) -> Features:
        with torch.autocast(images.device.type, enabled=False):
            features = self.net[:-1](to_float(images))
            return Features(features, self.net[-1](features))


def _small_cnn(channels: int, dim: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, dim, 3, padding=1),
        nn.BatchNorm2d(dim),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(dim, classes),
    )
