"""A file of random DINOv2 weights in the layout of facebookresearch/dinov2, and its network, written from the paper."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, DEPTH, HEADS = 128, 2, 2


def random_weights(path: Path, side: int = 37, width: int = WIDTH, depth: int = DEPTH) -> Path:
    """Write the file, of side x side positions, and return its path; all parts of the network change its features."""
    g, d = torch.Generator().manual_seed(0), width

    def drawn(*shape: int, std: float = 0.5, mean: float = 0.0) -> Tensor:
        return mean + std * torch.randn(*shape, generator=g)

    def linear(name: str, inputs: int, outputs: int) -> dict[str, Tensor]:
        return {f"{name}.weight": drawn(outputs, inputs, std=inputs**-0.5), f"{name}.bias": drawn(outputs, std=0.1)}

    def norm(name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": drawn(d, std=0.2, mean=1.0), f"{name}.bias": drawn(d, std=0.1)}

    state = {"cls_token": drawn(1, 1, d), "pos_embed": drawn(1, 1 + side**2, d), "mask_token": drawn(1, d)}
    state |= {"patch_embed.proj.weight": drawn(d, 3, 14, 14, std=0.05), "patch_embed.proj.bias": drawn(d)}
    for i in range(depth):
        block = f"blocks.{i}"
        state |= {**norm(f"{block}.norm1"), **linear(f"{block}.attn.qkv", d, 3 * d), **norm(f"{block}.norm2")}
        state |= {**linear(f"{block}.attn.proj", d, d), f"{block}.ls1.gamma": drawn(d), f"{block}.ls2.gamma": drawn(d)}
        state |= {**linear(f"{block}.mlp.fc1", d, 4 * d), **linear(f"{block}.mlp.fc2", 4 * d, d)}
    torch.save({**state, **norm("norm")}, path)
    return path


class Original(nn.Module):
    """DINOv2's function of images that are 224x224 and standardised."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.state = torch.load(path, weights_only=True)

    def part(self, name: str) -> tuple[Tensor, Tensor]:
        return self.state[f"{name}.weight"], self.state[f"{name}.bias"]

    def positions(self) -> Tensor:
        """With `interpolate_offset` 0.1 and without antialiasing, to 16x16."""
        token, patches = self.state["pos_embed"].split([1, self.state["pos_embed"].shape[1] - 1], dim=1)
        side = round(patches.shape[1] ** 0.5)
        grid = patches.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        if side != 16:
            grid = F.interpolate(grid, scale_factor=(16.1 / side, 16.1 / side), mode="bicubic")
        return torch.cat([token, grid.flatten(2).transpose(1, 2)], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, *self.part("patch_embed.proj"), stride=14).flatten(2).transpose(1, 2)
        x = torch.cat([self.state["cls_token"].expand(len(x), -1, -1), x], dim=1) + self.positions()
        for i in range(DEPTH):
            x = x + self.state[f"blocks.{i}.ls1.gamma"] * self.attention(f"blocks.{i}", x)
            hidden = F.gelu(F.linear(self.norm(f"blocks.{i}.norm2", x), *self.part(f"blocks.{i}.mlp.fc1")))
            x = x + self.state[f"blocks.{i}.ls2.gamma"] * F.linear(hidden, *self.part(f"blocks.{i}.mlp.fc2"))
        return self.norm("norm", x)[:, 0]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), *self.part(name), eps=1e-6)

    def attention(self, block: str, x: Tensor) -> Tensor:
        n, t, d = x.shape
        qkv = F.linear(self.norm(f"{block}.norm1", x), *self.part(f"{block}.attn.qkv"))
        q, k, v = qkv.reshape(n, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * (d // HEADS) ** -0.5).softmax(dim=-1)
        return F.linear((weights @ v).transpose(1, 2).reshape(n, t, d), *self.part(f"{block}.attn.proj"))
