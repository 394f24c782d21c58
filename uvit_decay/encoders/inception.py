"""The Inception-v3 of FID: extractor, weights file and network of TensorFlow's model of 2015-12-05.

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

from uvit_decay.encoders.extractors import Features, Pretrained
from uvit_decay.encoders.resize import RESIZE, Protocol
from uvit_decay.files.download import checksum, download
from uvit_decay.files.tensor_files import load_weights
from uvit_decay.runtime.precision import Precision
from uvit_decay.terminal.errors import UserError, explain
from uvit_decay.terminal.typed import check_types

PUBLISHED = "6726825d"  # start of the sha256 of the Inception weights behind all published numbers
WEIGHTS = "torch-fidelity's Inception weights"
_STEM = ("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "MaxPool_1", "Conv2d_3b_1x1", "Conv2d_4a_3x3", "MaxPool_2")
_TO_6D = (*_STEM, "Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6a", "Mixed_6b", "Mixed_6c", "Mixed_6d")
_FROM_6E = ("Mixed_6e", "Mixed_7a", "Mixed_7b", "Mixed_7c")


@check_types
class Inception(Pretrained):
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
        protocol: Protocol = "pytorch-fid",
        spatial: bool = False,
        compile: bool | str = False,
        precision: Precision = "float32",
    ) -> None:
        super().__init__(weights, compile, precision)
        self.protocol = protocol
        self.spatial = spatial
        self.name = f"inception-v3-{protocol}"
        if precision != "float32":
            self.name += f"-{precision}"
        self.widths = {"features": 2048, "logits": 1008}
        if spatial:
            self.widths["spatial"] = 2023

    def open(self) -> nn.Module:
        path = weights_file(self.weights)
        net = InceptionV3(path, self.protocol, self.spatial, narrow=self.precision == "bf16")
        self.sha256 = checksum(path)
        return net

    def prepare(self, images: Tensor, labels: Tensor, device: torch.device) -> None:
        super().prepare(images, labels, device)
        self.net.place(device)

    def extract(self, images: Tensor) -> Features:
        features, logits, spatial = self.net(self.rgb(images))
        return Features(features, logits, spatial)

    def missing(self) -> str | None:
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


def weights_file(path: str | None) -> Path:
    """Return the file of the weights; None means torch-fidelity's in torch's cache, downloaded if missing."""
    if path is not None:
        return Path(path)
    file = locate_cached_weights()
    expected = file.stem.rpartition("-")[2]  # the start of its SHA-256
    try:
        download(URL_INCEPTION_V3, file, expected)
    except UserError as error:
        hint = "or name their file by `inception_weights` (in a config: init_args.weights)"
        raise UserError(f"no Inception weights: {error}, {hint}") from error
    return file


def locate_cached_weights() -> Path:
    """Return the path of torch-fidelity's weights in torch's cache, where they may be missing."""
    _, _, name = URL_INCEPTION_V3.rpartition("/")
    return Path(torch.hub.get_dir()) / "checkpoints" / name


class InceptionV3(nn.Module):
    """Network from uint8 images to 2048 features after pool 3, 1008 logits without bias and optional spatial features.

    The layers are torch-fidelity's, with each batch norm folded into its convolution: equal up to rounding, and faster.
    With `narrow`, weights and activations of the convolutions are bfloat16; resizing, the last mean and the logits are
    float32.
    """

    def __init__(self, path: Path, protocol: Protocol, spatial: bool, narrow: bool = False) -> None:
        super().__init__()
        self.dtype = torch.bfloat16 if narrow else torch.float32
        self.resize = RESIZE[protocol]
        self.spatial = spatial
        layers = _fold(_layers(path))
        to_6d = [getattr(layers, name) for name in _TO_6D]
        from_6e = [getattr(layers, name) for name in _FROM_6E]
        self.to_6d = nn.Sequential(*to_6d)
        self.from_6e = nn.Sequential(*from_6e)
        self.pool = layers.AvgPool
        self.to(self.dtype)
        # Cloned, because the tensors of the file may be memory-mapped.
        self.register_buffer("head", layers.fc.weight.detach().T.clone())
        self.eval().requires_grad_(False)

    def place(self, device: torch.device) -> None:
        """Move to `device`; on a CPU channels are last, which is 1.5 times as fast (not measured on GPUs)."""
        self.memory_format = torch.channels_last if device.type == "cpu" else torch.contiguous_format
        self.to(device, memory_format=self.memory_format)

    def forward(
        self, images: UInt8[Tensor, "n 3 h w"]
    ) -> tuple[Float32[Tensor, "n 2048"], Float32[Tensor, "n 1008"], Float32[Tensor, "n 2023"] | None]:
        pixels = self.resize(images).to(self.dtype, memory_format=self.memory_format)
        x = self.to_6d(pixels)
        spatial = None
        if self.spatial:  # ADM's 7 channels of TensorFlow's mixed_6/conv, the first branch of 6d; channels last
            spatial = x[:, :7].permute(0, 2, 3, 1).flatten(1).float()
        features = self.pool(self.from_6e(x).float()).flatten(1)
        return features, features @ self.head, spatial


def _layers(path: Path) -> FeatureExtractorInceptionV3:
    """Return torch-fidelity's network with the weights of a file; code in the file is not executed."""
    state = load_weights(path, WEIGHTS)
    # torch-fidelity's constructor unpickles a file without restrictions, so it gets a file with names and shapes only.
    shapes = io.BytesIO()
    without_values = {name: value.to("meta") for name, value in state.items()}
    torch.save(without_values, shapes)
    shapes.seek(0)
    # Random initialisation is skipped, because the tensors of the file replace all parameters.
    with torch.device("meta"), explain(f"{path} does not hold {WEIGHTS}", RuntimeError):
        layers = FeatureExtractorInceptionV3("inception-v3-compat", ["2048"], shapes)
    layers.load_state_dict(state, assign=True)
    return layers


def _fold(module: nn.Module) -> nn.Module:
    """Fold every batch norm below `module` into its convolution, in place, and return `module`."""
    for name, child in module.named_children():
        if isinstance(child, BasicConv2d):
            convolution = fuse_conv_bn_eval(child.conv, child.bn)
            setattr(module, name, nn.Sequential(convolution, nn.ReLU(inplace=True)))
        else:
            _fold(child)
    return module
