"""DINOv2 (Oquab et al., 2023) as an extractor; its Frechet and kernel distances are known as FDD and KDD."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Float32, UInt8
from torch import Tensor, nn

from uvit_decay.encoders.extractors import Features, Pretrained
from uvit_decay.encoders.resize import DINOV2_SIZE, RESIZE_DINOV2, DINOv2Protocol
from uvit_decay.files.tensor_files import digest, load_weights, mismatch
from uvit_decay.runtime.constants import IMAGENET_MEAN, IMAGENET_STD
from uvit_decay.runtime.precision import Precision, computing
from uvit_decay.terminal.errors import UserError, explain
from uvit_decay.terminal.typed import check_types

LARGE = (1024, 24)  # width and depth of the network of all published numbers


@check_types
class DINOv2(Pretrained):
    """DINOv2's ViT-L/14 at 224x224: 1024 features, the class token after the final norm.

    Grey images are repeated to RGB. FDD is comparable only between equal protocols, which differ in the resizing:
    `dinov2-edm2` (EDM2) is torch's antialiased bicubic on float pixels, `dinov2-dgm` (dgm-eval) is Pillow's on uint8.
    Statistics of other weights are refused.

    Args:
        weights: file of the weights, in the layout of timm or of facebookresearch/dinov2; null means timm's file in the
            cache of the Hugging Face hub, downloaded (1.2 GB) if missing. ViT-S/14 and B/14 are faster; the size is
            then part of the extractor's name.
        protocol: method of resizing.
        compile: compile the network with torch.compile: true, or the name of a backend.
        precision: precision of the network, part of the name unless it is float32, as in published numbers.
    """

    family = "dinov2"

    def __init__(
        self,
        weights: str | Path | None = None,
        protocol: DINOv2Protocol = "dinov2-edm2",
        compile: bool | str = False,
        precision: Precision = "float32",
    ) -> None:
        super().__init__(weights, compile, precision)
        self.protocol = protocol
        self._set_size(*LARGE)

    def _set_size(self, dim: int, depth: int) -> None:
        """Set the name and the widths for a network of this size."""
        self.widths = {"features": dim}
        self.name = str(self.protocol)
        if (dim, depth) != LARGE:
            self.name += f"-{dim}x{depth}"
        if self.precision != "float32":
            self.name += f"-{self.precision}"

    def open(self) -> nn.Module:
        net = DINOv2Net(weights_file(self.weights), self.protocol)
        self._set_size(net.dim, net.depth)
        self.sha256 = net.sha256
        return net

    def extract(self, images: Tensor) -> Features:
        with computing(images.device, self.precision):
            return Features(self.net(self.rgb(images)))

    def missing(self) -> str | None:
        from huggingface_hub import try_to_load_from_cache

        if self.weights is not None or isinstance(try_to_load_from_cache(REPOSITORY, FILE), str):
            return None
        return f"DINOv2's weights ({REPOSITORY})"

    def remark(self) -> str | None:
        return f"DINOv2's weights: sha256 {self.sha256} of names and values"


WEIGHTS = "timm's or facebookresearch's DINOv2 weights"
REPOSITORY = "timm/vit_large_patch14_dinov2.lvd142m"  # on the Hugging Face hub
FILE = "model.safetensors"
PATCH = 14  # side of a patch in pixels
HEAD = 64  # width of an attention head, in all sizes
OFFSET = 0.1  # of the original's interpolation


def weights_file(path: str | None) -> Path:
    """Return the file of the weights; None means timm's ViT-L/14 in the cache of the hub, downloaded if missing."""
    if path is not None:
        return Path(path)
    from huggingface_hub import hf_hub_download

    hint = "or name their file by `dinov2_weights` (in a config: init_args.weights)"
    with explain("no DINOv2 weights", OSError, ValueError, RuntimeError, hint=hint):
        return Path(hf_hub_download(REPOSITORY, FILE))


class DINOv2Net(nn.Module):
    """Network from uint8 images to their class tokens after the final norm.

    The file has timm's layout or the layout of facebookresearch/dinov2 (dinov2_vitl14_pretrain.pth), which adds a mask
    token. Width and depth are read from the tensors. ViT-S, B and L are supported, but not g, which has another MLP.

    Attributes:
        dim: width d, the number of features.
        depth: number of blocks.
        sha256: SHA-256 of names and values of the tensors, the same for both layouts.
    """

    def __init__(self, path: Path, protocol: DINOv2Protocol) -> None:
        super().__init__()
        tensors = load_weights(path, WEIGHTS)
        state = {name: value for name, value in tensors.items() if name != "mask_token"}
        self.vit, self.dim, self.depth = _vision_transformer(state, path)  # also checks the tensors
        self.resize = RESIZE_DINOV2[protocol]
        self.sha256 = digest(state)
        self.register_buffer("mean", 255 * torch.tensor(IMAGENET_MEAN)[:, None, None])
        self.register_buffer("std", 255 * torch.tensor(IMAGENET_STD)[:, None, None])
        self.eval().requires_grad_(False)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the transformer; some ways of resizing run in Pillow."""
        self.vit.compile(*args, **kwargs)

    def forward(self, images: UInt8[Tensor, "n 3 h w"]) -> Float32[Tensor, "n d"]:
        pixels = (self.resize(images) - self.mean) / self.std
        return self.vit(pixels).float()


def _vision_transformer(state: Mapping[str, Tensor], path: Path) -> tuple[nn.Module, int, int]:
    """Return timm's network at 224x224 with a copy of these weights, its width and its depth."""
    import timm

    with explain(f"{path} does not hold {WEIGHTS}", Exception):  # its tensors may have any shape
        dim = state["cls_token"].shape[2]
        depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
        sizes = {"img_size": DINOV2_SIZE, "embed_dim": dim, "depth": depth, "num_heads": dim // HEAD, "num_classes": 0}
        with torch.device("meta"):  # skips the random initialisation; the tensors below replace all parameters
            model = timm.create_model("vit_large_patch14_dinov2", **sizes)
        positions = positions_at(state["pos_embed"], DINOV2_SIZE // PATCH)
        state = {**state, "pos_embed": positions}
    if problem := mismatch(model, state, "DINOv2"):
        raise UserError(f"{path} does not hold {WEIGHTS}: {problem}")
    copies = {name: value.clone() for name, value in state.items()}  # the tensors of the file may be memory-mapped
    model.load_state_dict(copies, assign=True)
    return model, dim, depth


def positions_at(positions: Float[Tensor, "1 old d"], side: int) -> Float[Tensor, "1 new d"]:
    """Return the embeddings of the class token and of side x side patches, interpolated as in facebookresearch/dinov2.

    The original resamples bicubically without antialiasing, by the factor (side + 0.1) / old side: sampling points are
    slightly denser than the patches. (Its settings are interpolate_offset 0.1 and interpolate_antialias False for
    models without registers, and so in dgm-eval, EDM2 and torch-fidelity.) timm's `resample_abs_pos_embed` antialiases
    and has no offset, so its features at 224x224 differ.
    """
    token = positions[:, :1]
    patches = positions[:, 1:]
    old = math.isqrt(patches.shape[1])
    if old == side:
        return positions
    factor = (side + OFFSET) / old
    grid = rearrange(patches, "1 (h w) d -> 1 d h w", h=old)
    grid = F.interpolate(grid, scale_factor=(factor, factor), mode="bicubic", antialias=False)
    resized = rearrange(grid, "1 d h w -> 1 (h w) d")
    return torch.cat([token, resized], dim=1)
