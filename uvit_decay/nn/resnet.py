"""ResNet-18 and deeper ResNets with decayed shortcuts, for the paper's study of the rank (App. B.2, Fig. 7).

A block computes relu(alpha * shortcut(x) + f(x)), where the shortcut is the identity or a projection. So L blocks have
L residual branches. Deeper networks have more blocks in the third of the four stages, as in the paper. Names, shapes
and initialisation are torchvision's: its resnet18 weights load with strict=True, and with alpha_min = 1 the function is
the same. b = batch, d = width of the pooled features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from uvit_decay import decay
from uvit_decay.decay.connection import Connection
from uvit_decay.decay.weights import Weighted
from uvit_decay.nn.arguments import check_data_sizes, collect_arguments
from uvit_decay.nn.base import DecayedNet
from uvit_decay.nn.embed import Pixels, PixelScale
from uvit_decay.nn.inputs import check_images
from uvit_decay.nn.intermediates import Layer
from uvit_decay.runtime.precision import without_autocast
from uvit_decay.terminal.typed import Bounds, check_types

Stem = Literal["imagenet", "cifar"]


class DecayedBlock(BasicBlock):
    """torchvision's BasicBlock with a connection around its branch; a network replaces the plain one."""

    last_layers = ("bn2",)
    gates = ()

    connections: tuple[Connection] = (Weighted(),)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = x if self.downsample is None else self.downsample(x)
        (connection,) = self.connections
        return self.relu(connection(shortcut, out))

    def zero_init(self) -> None:
        """Zero the scales of the last norm, so that the branch's output starts at 0."""
        nn.init.zeros_(self.bn2.weight)


@check_types
class ResNet(DecayedNet, pipeline_tag="image-classification"):
    """ResNet net(x) -> (b, num_classes) logits of images (b, c, h, w) of about [-1, 1].

    Args:
        image_size: height and width in pixels. Null in a configuration means as the data, also for channels
            and num_classes.
        channels: 3 for RGB, 1 for grey, any number with `pixels` unit.
        width: channels of the first stage; each further stage has twice as many, and d = 8 `width`.
        depth: number of residual blocks L, 8 in ResNet-18: 2 in each stage, and `depth` - 6 in the third.
        num_classes: K classes; 0 for an encoder without classifier.
        stem: `imagenet` (7x7 convolution and max-pooling, a quarter of the size) or `cifar` (3x3, full size).
        alpha_min: weight of the deepest shortcut, in (0, 1]; 1 is the ordinary network.
        schedule: how alpha falls with depth, see `uvit_decay.decay.shortcuts`.
        index: how depth is counted; `code` runs from exactly 1 to exactly alpha_min.
        zero_init: initialise residual branches to output 0.
        pixels: scale in which the network computes: `imagenet` (mean and standard deviation) or `unit`, [-1, 1].
    """

    null_label = False
    num_prefix_tokens = 0
    checkpointing = False  # because batch norms would count each batch twice
    layers = (Layer("avgpool", "encoder"),)

    def __init__(
        self,
        image_size: int | None = 224,
        channels: int | None = 3,
        width: Annotated[int, Bounds(1, 2**16)] = 64,
        depth: Annotated[int, Bounds(7, 1000)] = 8,
        num_classes: int | None = 0,
        stem: Stem = "imagenet",
        alpha_min: float = 1.0,
        schedule: decay.Schedule = "linear",
        index: decay.Index = "code",
        zero_init: bool = False,
        pixels: Pixels = "imagenet",
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] = collect_arguments(locals())
        check_data_sizes(self.config)
        self.image_size = image_size
        self.channels = channels
        self.num_classes = num_classes
        self.dim = 8 * width
        self.scale = PixelScale.of(pixels, channels)

        if stem == "cifar":
            self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(width, width, 2, stride=1)
        self.layer2 = _stage(width, 2 * width, 2, stride=2)
        self.layer3 = _stage(2 * width, 4 * width, depth - 6, stride=2)
        self.layer4 = _stage(4 * width, 8 * width, 2, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        if num_classes:
            self.fc = nn.Linear(self.dim, num_classes)
        self.record_shortcuts(decay.shortcuts(depth, alpha_min, schedule, index=index, per_block=1))

        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if zero_init:
            self.silence(self.blocks())
        self.connect()

    def blocks(self) -> list[DecayedBlock]:
        """Return all residual blocks in execution order."""
        return [*self.layer1, *self.layer2, *self.layer3, *self.layer4]

    @property
    def linear_head(self) -> nn.Linear:
        """The linear layer of the classifier."""
        return self.fc

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Return logits; the network needs a classifier (`num_classes`)."""
        return self.classify(self.pooled(x))

    def classify(self, features: Float[Tensor, "b d"]) -> Float[Tensor, "b classes"]:
        """Return the logits of pooled features."""
        with without_autocast(features):
            return self.fc(features.to(self.fc.weight.dtype))

    def pooled(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d"]:
        """Return the input of the classifier: the mean over positions after the last block."""
        check_images(self, x)
        x = self.scale.normalise(x).contiguous(memory_format=torch.channels_last)  # faster, especially in bfloat16
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for block in self.blocks():
            x = block(x)
        return self.avgpool(x).flatten(1)

    def forward_intermediates(self, x: Float[Tensor, "b c h w"]) -> Iterator[Float[Tensor, "b 1 d"]]:
        """Yield the pooled features as a single token."""
        yield self.pooled(x)[:, None]


def _stage(inside: int, outside: int, blocks: int, stride: int) -> nn.Sequential:
    """Return a stage of `blocks` blocks; the first one projects its shortcut if the shape changes.

    `inside` and `outside` are the channels of the stage's input and output.
    """
    downsample = None
    if (inside, stride) != (outside, 1):
        projection = nn.Conv2d(inside, outside, 1, stride, bias=False)
        downsample = nn.Sequential(projection, nn.BatchNorm2d(outside))
    stage = nn.Sequential(DecayedBlock(inside, outside, stride, downsample))
    for _ in range(blocks - 1):
        stage.append(DecayedBlock(outside, outside))
    return stage
