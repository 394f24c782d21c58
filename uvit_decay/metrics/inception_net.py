"""The Inception-v3 of FID: weights file and network of TensorFlow's model of 2015-12-05 in torch-fidelity's port.

n = images.
"""

from __future__ import annotations

import io
from pathlib import Path

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3, BasicConv2d, FeatureExtractorInceptionV3

from uvit_decay.metrics.resize import RESIZE, Protocol
from uvit_decay.runtime.download import download
from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.tensor_files import load_weights

WEIGHTS = "torch-fidelity's Inception weights"
_TO_6D = (
    *("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "MaxPool_1", "Conv2d_3b_1x1", "Conv2d_4a_3x3", "MaxPool_2"),
    *("Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6a", "Mixed_6b", "Mixed_6c", "Mixed_6d"),
)
_FROM_6E = ("Mixed_6e", "Mixed_7a", "Mixed_7b", "Mixed_7c")


def weights_file(path: str | None) -> Path:
    """Return the file of the weights; None means torch-fidelity's in torch's cache, downloaded if missing."""
    if path is not None:
        return Path(path)
    file = cached_place()
    try:
        download(URL_INCEPTION_V3, file, file.stem.rpartition("-")[2])  # the start of its SHA-256
    except UserError as error:
        hint = "or name its place with --inception-weights PATH (in a config: init_args.weights)"
        raise UserError(f"no Inception weights: {error}, {hint}") from error
    return file


def cached_place() -> Path:
    """Return where torch's cache has torch-fidelity's weights, if they are there."""
    return Path(torch.hub.get_dir()) / "checkpoints" / URL_INCEPTION_V3.rpartition("/")[2]


class InceptionV3(nn.Module):
    """Network from uint8 images to 2048 features after pool 3, 1008 logits without bias and optional spatial features.

    The layers are torch-fidelity's, with each batch norm folded into its convolution: equal up to rounding, and faster.
    `narrow` stores weights and activations of the convolutions in bfloat16; resizing, the last mean and the logits stay
    float32.
    """

    def __init__(self, path: Path, protocol: Protocol, spatial: bool, narrow: bool = False) -> None:
        super().__init__()
        self.dtype = torch.bfloat16 if narrow else torch.float32
        self.resize, self.spatial = RESIZE[protocol], spatial
        layers = _fold(_layers(path))
        self.to_6d = nn.Sequential(*(getattr(layers, name) for name in _TO_6D))
        self.from_6e = nn.Sequential(*(getattr(layers, name) for name in _FROM_6E))
        self.pool = layers.AvgPool
        self.to(self.dtype)
        # A clone: the tensors of the file may be memory-mapped.
        self.register_buffer("head", layers.fc.weight.detach().T.clone())
        self.eval().requires_grad_(False)

    def place(self, device: torch.device) -> None:
        """Move to `device`, on a CPU with channels last, which is 1.5 times as fast; on GPUs it was not measured."""
        self.memory_format = torch.channels_last if device.type == "cpu" else torch.contiguous_format
        self.to(device, memory_format=self.memory_format)

    def forward(
        self, images: UInt8[Tensor, "n 3 h w"]
    ) -> tuple[Float32[Tensor, "n 2048"], Float32[Tensor, "n 1008"], Float32[Tensor, "n 2023"] | None]:
        x = self.to_6d(self.resize(images).to(self.dtype, memory_format=self.memory_format))
        spatial = None
        if self.spatial:  # TensorFlow's mixed_6/conv, the first branch of 6d, and of it ADM's 7 channels, channels last
            spatial = x[:, :7].permute(0, 2, 3, 1).flatten(1).float()
        features = self.pool(self.from_6e(x).float()).flatten(1)
        return features, features @ self.head, spatial


def _layers(path: Path) -> FeatureExtractorInceptionV3:
    """Return torch-fidelity's network with the weights of a file; code in the file is not executed."""
    state = load_weights(path, WEIGHTS)
    # torch-fidelity's constructor unpickles a file without restrictions: it gets one of names and shapes alone.
    shapes = io.BytesIO()
    torch.save({name: value.to("meta") for name, value in state.items()}, shapes)
    shapes.seek(0)
    # Its random initialisation is skipped: the tensors of the file replace all parameters.
    with torch.device("meta"), explained(f"{path} does not hold {WEIGHTS}", RuntimeError):
        layers = FeatureExtractorInceptionV3("inception-v3-compat", ["2048"], shapes)
    layers.load_state_dict(state, assign=True)
    return layers


def _fold(module: nn.Module) -> nn.Module:
    """Fold every batch norm below `module` into its convolution, in place, and return `module`."""
    for name, child in module.named_children():
        if isinstance(child, BasicConv2d):
            setattr(module, name, nn.Sequential(fuse_conv_bn_eval(child.conv, child.bn), nn.ReLU(inplace=True)))
        else:
            _fold(child)
    return module
