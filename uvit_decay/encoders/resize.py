"""Resizing of uint8 images to the size of a network; protocols of the same network differ only in it.

n = images, h and w = their height and width. Outputs for Inception-v3 (299x299) are float32 in [-1, 1]; outputs for
DINOv2 (224x224) are float32 pixels of about [0, 255].
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float32, UInt8
from PIL import Image
from torch import Tensor

Protocol = Literal["pytorch-fid", "adm", "clean"]
DINOv2Protocol = Literal["dinov2-edm2", "dinov2-dgm"]
SIZE = 299
DINOV2_SIZE = 224


def resize_pytorch_fid(images: UInt8[Tensor, "n 3 h w"]) -> Float32[Tensor, "n 3 299 299"]:
    """Resize as pytorch-fid, and so U-ViT: bilinear between pixel centres, without antialiasing."""
    x = F.interpolate(images.float() / 255, (SIZE, SIZE), mode="bilinear", align_corners=False)
    return x * 2 - 1


def resize_adm(images: UInt8[Tensor, "n 3 h w"]) -> Float32[Tensor, "n 3 299 299"]:
    """Resize as TensorFlow 1, and so torch-fidelity and ADM (SiT): bilinear between upper left corners."""
    from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x

    return (interpolate_bilinear_2d_like_tensorflow1x(images.float(), (SIZE, SIZE), align_corners=False) - 128) / 128


def resize_clean(images: UInt8[Tensor, "n 3 h w"]) -> Float32[Tensor, "n 3 299 299"]:
    """Resize as clean-fid (Parmar et al., 2022): Pillow's antialiased bicubic filter on float pixels, not rounded."""
    x = F.interpolate(images.float(), (SIZE, SIZE), mode="bicubic", align_corners=False, antialias=True)
    return (x.clamp(0, 255) - 128) / 128


def resize_edm2(images: UInt8[Tensor, "n 3 h w"]) -> Float32[Tensor, "n 3 224 224"]:
    """Resize as EDM2's metrics: torch's antialiased bicubic filter, neither rounded nor clamped to [0, 255]."""
    return F.interpolate(images.float(), (DINOV2_SIZE, DINOV2_SIZE), mode="bicubic", antialias=True)


def resize_dgm(images: UInt8[Tensor, "n 3 h w"]) -> Float32[Tensor, "n 3 224 224"]:
    """Resize as dgm-eval (Stein et al., 2023): Pillow's antialiased bicubic filter on uint8, which rounds and clamps.

    Pillow runs on the CPU, so images on a GPU are copied there and back.
    """
    resized = []
    for pixels in images.permute(0, 2, 3, 1).cpu().numpy():
        picture = Image.fromarray(pixels).resize((DINOV2_SIZE, DINOV2_SIZE), Image.Resampling.BICUBIC)
        resized.append(np.asarray(picture))
    batch = torch.from_numpy(np.stack(resized)).to(images.device)
    return batch.permute(0, 3, 1, 2).float().contiguous()


RESIZE = {"pytorch-fid": resize_pytorch_fid, "adm": resize_adm, "clean": resize_clean}  # by Protocol
RESIZE_DINOV2 = {"dinov2-edm2": resize_edm2, "dinov2-dgm": resize_dgm}
