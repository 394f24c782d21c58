"""The small classifier of metrics: a convolutional network, trained on the images that samples are compared with.

It is for images unlike Inception's training data, and for machines without Inception's weights. Its features, and so
all distances, are comparable only for the same training images.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from uvit_decay.encoders.extractors import Features, TrainedExtractor
from uvit_decay.pictures import to_float
from uvit_decay.runtime.distributed import cpu_threads
from uvit_decay.runtime.precision import computing
from uvit_decay.runtime.random import generator
from uvit_decay.terminal.progress import track
from uvit_decay.terminal.typed import check_types

NAME = "small-cnn-2"  # in the keys of values: numbers of different classifiers do not compare
FEATURES = 64
SIDE = 32  # pixels; larger images are averaged down to this side
HALVED = 16  # pixels; the first convolution halves larger images
HALVING = 4  # side of the kernel of such a convolution
BATCH = 64  # images of a training step
RATE, DECAY, SMOOTHING = 4e-3, 0.05, 0.05  # highest learning rate, weight decay, label smoothing
CYCLES = 4  # cosine cycles of the learning rate at most; each is twice as long as the one before
MANY = 10_000  # images; the first cycle is one pass over them, and two passes over fewer
GAIN = 0.01  # share by which a cycle must lower the held-out loss for another one to follow
HELD_OUT, MOST_HELD_OUT = 0.1, 5000  # share of the images that is held out, and the largest number
AT_ONCE = 500  # held-out images in a batch
ACCURACY = "accuracy"  # name of the held-out accuracy among the stored tensors


class Score(NamedTuple):
    """Cross-entropy and accuracy on the held-out images."""

    loss: float
    accuracy: float


@check_types
class SmallClassifier(TrainedExtractor):
    """Small convolutional network, trained on the training set on the CPU: 64 features, logits of the data's classes.

    A tenth of the images, at most 5,000, is held out. The learning rate falls in cosine cycles, each twice as long as
    the one before (Loshchilov and Hutter, 2017); the training ends after four cycles, or after a cycle that lowers the
    held-out loss by less than 1 %. The first cycle is one pass over the images, or two passes over fewer than 10,000.
    Images larger than 32 pixels are averaged down. The result depends on the images and labels alone.
    """

    name = NAME
    channels = None

    def __init__(self) -> None:
        self.widths = {"features": FEATURES, "logits": 0}  # `prepare` sets the number of classes
        self.net: nn.Sequential | None = None

    def recipe(self) -> dict[str, Any]:
        settings = [BATCH, RATE, DECAY, SMOOTHING, CYCLES, MANY, GAIN, HELD_OUT, MOST_HELD_OUT]
        return {"classifier": self.name, "settings": settings, "torch": torch.__version__}

    def shrink(self, images: Tensor) -> Tensor:
        longest = max(images.shape[-2:])
        if longest <= SIDE:
            return images
        height, width = (max(1, round(side * SIDE / longest)) for side in images.shape[-2:])
        averaged = nn.functional.interpolate(images.float(), size=(height, width), mode="area")
        return averaged.round().to(torch.uint8)

    def prepare(self, images: Tensor, labels: Tensor, device: torch.device) -> None:
        if self.net is None:
            self.fit(images, labels)
        self.net.to(device)

    def fit(self, images: Tensor, labels: Tensor) -> None:
        # Equal at each call, independent of the global random state and modes.
        with (
            torch.random.fork_rng(devices=()),  # it trains on the CPU; the states of GPUs stay as they are
            torch.enable_grad(),
            torch.inference_mode(False),
            computing(torch.device("cpu"), "float32"),
            cpu_threads(1),  # the rounding of sums depends on the number of threads
        ):
            torch.default_generator.manual_seed(0)
            self._take(*_train(self.shrink(images.cpu()), labels))

    def state(self) -> dict[str, Tensor]:
        state = {name: tensor.cpu() for name, tensor in self.net.state_dict().items()}
        state[ACCURACY] = torch.tensor(self.accuracy, dtype=torch.float64)
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        weights = dict(state)
        accuracy = float(weights.pop(ACCURACY))
        last = max(int(name.partition(".")[0]) for name in weights)
        first = weights["0.weight"]
        net = _build_network(first.shape[1], len(weights[f"{last}.bias"]), halved=first.shape[-1] == HALVING)
        net.load_state_dict(weights)
        self._take(net, accuracy)

    def _take(self, net: nn.Sequential, accuracy: float) -> None:
        """Use a trained network, with its accuracy on the held-out images."""
        self.net = net.eval().requires_grad_(False)
        self.accuracy = accuracy
        self.channels = net[0].in_channels
        self.widths["logits"] = net[-1].out_features
        weights = [tensor.cpu().numpy().tobytes() for tensor in net.state_dict().values()]
        self.sha256 = hashlib.sha256(b"".join(weights)).hexdigest()

    def extract(self, images: Tensor) -> Features:
        features = self.net[:-1](to_float(self.shrink(images)))
        return Features(features, self.net[-1](features))


def _build_network(channels: int, classes: int, halved: bool) -> nn.Sequential:
    """Return a new network; with `halved`, the first convolution halves the images."""
    layers = [*_block(channels, 32, halved), *_block(32, 64), nn.MaxPool2d(2)]
    if halved:
        layers += [*_block(64, 128), nn.MaxPool2d(2), *_block(128, FEATURES)]
    else:
        layers += _block(64, FEATURES)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(FEATURES, classes))


def _block(c_in: int, c_out: int, halved: bool = False) -> tuple[nn.Module, ...]:
    kernel, stride = (HALVING, 2) if halved else (3, 1)
    convolution = nn.Conv2d(c_in, c_out, kernel, stride, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(c_out), nn.ReLU()


def _train(images: Tensor, labels: Tensor) -> tuple[nn.Sequential, float]:
    """Train until the held-out images are classified no better; return the best network, and its accuracy on them."""
    net = _build_network(images.shape[1], int(labels.max()) + 1, max(images.shape[-2:]) > HALVED)
    random = generator("small classifier, version 2")
    order = torch.randperm(len(images), generator=random)
    held_out, rest = order.tensor_split([min(MOST_HELD_OUT, max(1, round(HELD_OUT * len(images))))])
    net.to(memory_format=torch.channels_last)  # a third less time on CPUs
    optimizer = torch.optim.AdamW(net.parameters(), RATE, weight_decay=DECAY)
    steps = max(1, len(rest) // BATCH)  # of a pass
    first = steps  # of the first cycle
    if len(images) < MANY:
        first = 2 * steps
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, first, T_mult=2)
    best = Score(math.inf, 0.0)
    weights: dict[str, Tensor] = {}
    with track("small classifier", first * (2**CYCLES - 1), "step") as work:
        for cycle in range(CYCLES):
            for step in range(first * 2**cycle):
                if step % steps == 0:
                    order = rest[torch.randperm(len(rest), generator=random)]
                start = step % steps * BATCH
                chosen = order[start : start + BATCH]
                logits = net(_convert(images[chosen]))
                loss = nn.functional.cross_entropy(logits, labels[chosen], label_smoothing=SMOOTHING)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                work.update()
            score = _evaluate(net, images[held_out], labels[held_out])
            improves = score.loss < (1 - GAIN) * best.loss
            if score.loss < best.loss:
                best = score
                weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
            if not improves:
                break
    net.load_state_dict(weights)
    net.to(memory_format=torch.contiguous_format)
    return net, best.accuracy


def _convert(images: Tensor) -> Tensor:
    """Return images as floats in the memory format in which the network is trained."""
    return to_float(images).contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def _evaluate(net: nn.Sequential, images: Tensor, labels: Tensor) -> Score:
    """Return the score on these images; the network is in training mode before and after."""
    net.eval()
    logits = torch.cat([net(_convert(part)) for part in images.split(AT_ONCE)])
    net.train()
    accuracy = (logits.argmax(1) == labels).double().mean()
    return Score(float(nn.functional.cross_entropy(logits, labels)), float(accuracy))
