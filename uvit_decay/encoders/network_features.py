"""Networks of this project and of timm that describe an image by one vector, as extractors of generation metrics.

b = images, d = features, k = classes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.encoders.extractors import Extractor, Features
from uvit_decay.encoders.networks import Interpolation, final_norm, fit_pictures, open_network
from uvit_decay.encoders.timm_models import TimmFeatures, open_timm
from uvit_decay.files.tensor_files import digest
from uvit_decay.files.writing import at_home
from uvit_decay.generation.options import TIMM, LoadingOptions
from uvit_decay.nn.base import DecayedNet
from uvit_decay.nn.embed import PixelScale
from uvit_decay.nn.intermediates import PoolsFeatures, pooled, states_of
from uvit_decay.nn.resnet import ResNet
from uvit_decay.nn.vit import Encoder
from uvit_decay.pictures import to_float
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import check_types

SHORT = 12  # digits of the SHA-256 in names
Output = tuple[Float[Tensor, "b d"], Float[Tensor, "b k"] | None]  # features and logits


@dataclass(frozen=True)
class PooledNetwork:
    """A network in eval mode that describes each image by its pooled features.

    Args:
        net: function of images of its own size and channels, in [-1, 1], that returns features and logits or None; it
            has the attributes `image_size`, `channels` and `dim`.
        name: name of the network in names of results.
        about: network, features and input for reports, as plain values; without paths.
        interpolation: how images of another size are resized.
        class_names: names of the classes of the logits; empty without logits.
    """

    net: nn.Module
    name: str
    about: dict[str, Any]
    interpolation: Interpolation
    class_names: tuple[str, ...] = ()


def open_pooled(name: str, trusted: Sequence[str] = ()) -> PooledNetwork:
    """Open a checkpoint of an encoder or a classifier, or a model of timm, timm:NAME=FILE or timm:NAME.

    Args:
        name: path of the checkpoint, or the model of timm and the file of its weights; without a file its pretrained
            weights are used.
        trusted: classes outside uvit_decay, or modules, that a checkpoint may name.
    """
    if name.startswith(TIMM):
        return _open_timm(name)
    opened = open_network(Path(name), LoadingOptions(trust=trusted))
    net = opened.net
    kind = type(net).__name__
    if not opened.is_encoder:
        raise UserError(
            f"{name} is a denoiser ({kind}), whose features are of noisy images; give an encoder or a classifier"
        )
    features = "mean of the patch tokens after the last block"
    if isinstance(net, PoolsFeatures):
        features = "pooled features, the input of the classifier"
    elif final_norm(net) is not None:
        features += " and the final norm"
    scale = None
    if isinstance(net, Encoder | ResNet):
        scale = net.scale
    about = {
        "network": kind,
        "step": opened.about["step"],
        "weights": opened.about["weights"],
        "features": features,
        "input": _describe_input(net, "bicubic", scale),
    }
    if isinstance(net, DecayedNet):
        about["arguments"] = net.config
    return PooledNetwork(CheckpointFeatures(net), opened.name, about, "bicubic", opened.class_names)


class CheckpointFeatures(nn.Module):
    """Pooled features of a network of this project, and the logits of its classifier if it has one.

    Args:
        net: the network, with the interface `PoolsFeatures` or `HasIntermediates`. Without `pooled` the features are
            the mean of the patch tokens of the last layer, after the final norm if there is one.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.image_size = net.image_size
        self.channels = net.channels
        self.dim = net.dim

    def forward(self, x: Float[Tensor, "b c h w"]) -> Output:
        net = self.net
        if isinstance(net, PoolsFeatures):
            features = net.pooled(x)
            logits = net.classify(features).float() if net.num_classes else None
            return features.float(), logits
        (tokens,) = states_of(net, [len(net.layers) - 1], x)
        norm = final_norm(net)
        if norm is not None:
            tokens = norm(tokens)
        return pooled(tokens, "mean", net.num_prefix_tokens), None


def _describe_input(net: nn.Module, interpolation: Interpolation, scale: PixelScale | None) -> str:
    """Return size, channels and scale of a network's images, and how others are resized, as text."""
    size = net.image_size
    text = f"{size}x{size}x{net.channels}, others resized ({interpolation}, antialiased)"
    if scale is not None:
        text += f", mean {scale.mean}, standard deviation {scale.std} of values in [0, 1]"
    return text


def _open_timm(name: str) -> PooledNetwork:
    """Open timm:NAME=FILE or timm:NAME, with the input size, interpolation, mean and deviation of timm's configuration.

    timm's crop is left out: the whole image is resized.
    """
    from timm.data import resolve_model_data_config

    model_name, _, file = name.removeprefix(TIMM).partition("=")
    title = model_name
    if file:
        title += f"-{Path(file).stem}"
    model = open_timm(model_name, at_home(file) if file else None)
    config = resolve_model_data_config(model)
    interpolation = config["interpolation"]
    net = TimmFeatures(model, config)
    about = {
        "network": f"timm {model_name}",
        "features": "timm's pooled features, the input of the classifier",
        "input": _describe_input(net, interpolation, net.scale),
    }
    return PooledNetwork(net, title, about, interpolation)


@check_types
class NetworkFeatures(Extractor):
    """Pooled features of an encoder or classifier: a checkpoint of this project, or a model of timm.

    Images of another size than the network's are resized as a whole. A classifier with named classes also tells how
    many samples have the class that they were generated for (label consistency).

    Args:
        file: path of a .ckpt or .safetensors, timm:NAME=FILE, or timm:NAME for timm's pretrained weights.
        trusted: classes outside uvit_decay, or modules, that the file may name.
    """

    at_once = 16

    def __init__(self, file: str, trusted: Sequence[str] = ()) -> None:
        self.network = open_pooled(file, trusted)
        net = self.network.net.requires_grad_(False)
        # Of everything that the features depend on: weights, features and input.
        text = json.dumps([digest(net.state_dict()), self.network.about], sort_keys=True)
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.name = f"{self.network.name}-{self.sha256[:SHORT]}"
        self.channels = net.channels
        self.widths = {"features": net.dim}
        self.class_names = self.network.class_names
        if self.class_names:
            self.widths["logits"] = len(self.class_names)

    def fingerprint(self) -> str:
        """Return the name, which ends in the start of the SHA-256."""
        return self.name

    def describe(self) -> dict[str, Any]:
        return {"features": self.network.about}

    def prepare(self, images: Tensor, labels: Tensor, device: torch.device) -> None:
        self.network.net.to(device)

    def extract(self, images: Tensor) -> Features:
        network = self.network
        x = fit_pictures(to_float(images), network.net, network.name, network.interpolation)
        features, logits = network.net(x)
        return Features(features, logits if self.class_names else None)
