"""A file of random DINOv2 weights in the layout of facebookresearch/dinov2, and its network, written from the paper."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from reference import block, block_shapes, each, embed_patches, layer, norm, random_values
from torch import Tensor, nn

WIDTH, DEPTH, HEADS = 128, 2, 2


def random_weights(path: Path, side: int = 37, width: int = WIDTH, depth: int = DEPTH) -> Path:
    """Write the file, of side x side positions, and return its path; all parts of the network change its features."""
    shapes = {"cls_token": (1, 1, width), "pos_embed": (1, 1 + side**2, width), "mask_token": (1, width)}
    shapes |= layer("patch_embed.proj", width, 3, 14, 14) | layer("norm", width)
    for name in (f"blocks.{i}" for i in range(depth)):
        shapes |= block_shapes(name, width, 4 * width) | {f"{name}.ls{j}.gamma": (width,) for j in (1, 2)}
    torch.save(random_values(shapes, seed=0), path)
    return path


class Original(nn.Module):
    """DINOv2's forward pass on standardised 224x224 images."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.state = torch.load(path, weights_only=True)

    def positions(self) -> Tensor:
        """Interpolate the positions to 16x16, with `interpolate_offset` 0.1 and without antialiasing."""
        token, patches = self.state["pos_embed"].split([1, self.state["pos_embed"].shape[1] - 1], dim=1)
        side = round(patches.shape[1] ** 0.5)
        grid = patches.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        if side != 16:
            grid = F.interpolate(grid, scale_factor=(16.1 / side, 16.1 / side), mode="bicubic")
        return torch.cat([token, grid.flatten(2).transpose(1, 2)], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        patches = embed_patches(self.state, "patch_embed.proj", x)
        x = torch.cat([self.state["cls_token"].expand(len(x), -1, -1), patches], dim=1) + self.positions()
        for i in range(DEPTH):
            gammas = iter([self.state[f"blocks.{i}.ls{j}.gamma"] for j in (1, 2)])
            x = block(self.state, f"blocks.{i}", x, HEADS, 1e-6, alphas=each(None), betas=gammas)
        return norm(self.state, "norm", x, 1e-6)[:, 0]
