"""The Inception-v3 of every FID: TensorFlow's of 2015-12-05, as torch-fidelity ported it; its file and its network.

n = pictures.
"""

from __future__ import annotations

import io
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3, BasicConv2d, FeatureExtractorInceptionV3

from uvit_decay.download import agrees, checksum, download
from uvit_decay.errors import UserError, one_line
from uvit_decay.metrics.resize import RESIZE, Protocol
from uvit_decay.zips import check_records

_HASH = re.compile(r"-([0-9a-f]{8,64})\.\w+$")  # torch's convention: a name ends in the start of the file's sha256
_TO_6D = (
    *("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "MaxPool_1", "Conv2d_3b_1x1", "Conv2d_4a_3x3", "MaxPool_2"),
    *("Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6a", "Mixed_6b", "Mixed_6c", "Mixed_6d"),
)
_FROM_6E = ("Mixed_6e", "Mixed_7a", "Mixed_7b", "Mixed_7c", "AvgPool")


def weights_file(path: str | None) -> Path:
    """The file of the weights; null: torch-fidelity's, from torch's cache, where it is downloaded if it is not there.

    Raises:
        UserError: there is no such file and no network, or the sha256 is not the one that the file's name tells.
    """
    if path is None:
        return _cached()
    file = Path(path)
    named = _HASH.search(file.name)
    if named and not agrees(found := checksum(file), named[1]):
        reason = f"its sha256 is {found}, its name says {named[1]}"
        raise UserError(f"the Inception weights {file} are damaged or another file: {reason}")
    return file


def _cached() -> Path:
    name = URL_INCEPTION_V3.rpartition("/")[2]
    target = Path(torch.hub.get_dir()) / "checkpoints" / name
    there = target.exists()
    try:
        download(URL_INCEPTION_V3, target, _HASH.search(name)[1])
    except UserError as error:
        option = "" if there else ", or name its place with --inception-weights PATH (in a config: init_args.weights)"
        raise UserError(f"no Inception weights: {error}{option}") from error
    return target


class InceptionV3(nn.Module):
    """uint8 pictures to 2048 features after pool 3, 1008 logits without bias, and the spatial features if asked for.

    The layers are torch-fidelity's, each batch norm folded into its convolution: equal to rounding, and faster.
    """

    def __init__(self, path: Path, protocol: Protocol, spatial: bool) -> None:
        super().__init__()
        self.resize, self.spatial = RESIZE[protocol], spatial
        layers = _fold(_Layers(read_weights(path), path))
        self.to_6d = nn.Sequential(*(getattr(layers, name) for name in _TO_6D))
        self.from_6e = nn.Sequential(*(getattr(layers, name) for name in _FROM_6E))
        self.register_buffer(
            "head", layers.fc.weight.detach().T.clone()
        )  # clone: what was read may be mapped from disk
        self.eval().requires_grad_(False)

    def place(self, device: torch.device) -> None:
        """Move to `device`. CPUs are 1.5 times as fast with channels last; of GPUs without TF32 that is not known."""
        self.memory_format = torch.channels_last if device.type == "cpu" else torch.contiguous_format
        self.to(device, memory_format=self.memory_format)

    def forward(
        self, images: UInt8[Tensor, "n 3 h w"]
    ) -> tuple[Float32[Tensor, "n 2048"], Float32[Tensor, "n 1008"], Float32[Tensor, "n 2023"] | None]:
        x = self.to_6d(self.resize(images).contiguous(memory_format=self.memory_format))
        spatial = None
        if self.spatial:  # TensorFlow's mixed_6/conv, the first branch of 6d, and of it ADM's 7 channels, channels last
            spatial = x[:, :7].permute(0, 2, 3, 1).flatten(1)
        features = self.from_6e(x).flatten(1)
        return features, features @ self.head, spatial


class _Layers(FeatureExtractorInceptionV3):
    """torch-fidelity's network with tensors that were checked; its own way unpickles whatever a file holds."""

    def __init__(self, state: dict[str, Tensor], path: Path) -> None:
        self.given, self.path = state, path
        nothing = io.BytesIO()
        torch.save({}, nothing)
        nothing.seek(0)
        with torch.device("meta"):  # nothing is drawn only to be overwritten
            super().__init__("inception-v3-compat", ["2048"], nothing)

    def load_state_dict(self, state: dict[str, Tensor], *args: Any, **options: Any) -> Any:
        """Called with nothing by the constructor above."""
        _check_layout(self.given, self.state_dict(), self.path)
        return super().load_state_dict(self.given, strict=False, assign=True)


def _fold(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        if isinstance(child, BasicConv2d):
            setattr(module, name, nn.Sequential(fuse_conv_bn_eval(child.conv, child.bn), nn.ReLU(inplace=True)))
        else:
            _fold(child)
    return module


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file; nothing in it can run.

    Raises:
        UserError: it cannot be read, is damaged, or is no flat dictionary of tensors.
    """
    try:
        mapped = zipfile.is_zipfile(path)
        if mapped:
            check_records(path, whole=True)
        with warnings.catch_warnings(action="ignore"):  # about other pickles, which are refused
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # any: bytes that are no pickle can lead an unpickler anywhere
        raise UserError(f"the Inception weights {path} cannot be read: {one_line(error)}") from error
    if not isinstance(state, dict):
        raise _refused(path, f"it is no state_dict but a {type(state).__name__}")
    for name, value in state.items():
        if not isinstance(value, Tensor):
            reason = f"a state_dict in a wrapping, {name!r} is a {type(value).__name__}: save the inner one alone"
            raise _refused(path, reason)
    return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}


def _check_layout(state: dict[str, Tensor], wanted: dict[str, Tensor], path: Path) -> None:
    """Raise a UserError unless names and shapes are the wanted ones and all numbers are finite."""
    if any(name.startswith("AuxLogits.") for name in state):
        raise _refused(path, f"it looks like torchvision's, which were trained anew; FID needs {URL_INCEPTION_V3}")
    missing = [name for name in wanted if name not in state and not name.endswith(".num_batches_tracked")]
    unknown = [name for name in state if name not in wanted]
    for names, what in ((missing, "missing"), (unknown, "unknown")):
        if names:
            raise _refused(path, f"{len(names)} tensors are {what}, the first is {names[0]}")
    for name, value in state.items():
        if value.shape != wanted[name].shape:
            raise _refused(path, f"{name} is {tuple(value.shape)}, not {tuple(wanted[name].shape)}")
        if not value.isfinite().all():
            raise _refused(path, f"{name} has values that are not finite")


def _refused(path: Path, reason: str) -> UserError:
    return UserError(f"{path} does not hold torch-fidelity's Inception weights: {reason}")
