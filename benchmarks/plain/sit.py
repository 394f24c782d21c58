"""The decayed SiT with its long skips as its authors' code computes it: adaLN in every block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.plain.blocks import Attention, Mlp, PatchEmbed, alphas, timestep_embedding, unpatchify


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class SiTBlock(nn.Module):
    def __init__(self, dim: int, heads: int, skip: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(dim, heads, qkv_bias=True, float32=False)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(dim, "tanh")
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.skip = nn.Linear(dim, dim) if skip else None

    def forward(self, x: Tensor, c: Tensor, alpha: tuple[float, float], skip: Tensor | None = None) -> Tensor:
        if self.skip is not None:
            x = x + self.skip(skip)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = alpha[0] * x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        return alpha[1] * x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class FinalLayer(nn.Module):
    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(dim, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class TimestepEmbedder(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        return self.mlp(timestep_embedding(t, 256))


class LabelEmbedder(nn.Module):
    def __init__(self, labels: int, dim: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(labels, dim)

    def forward(self, y: Tensor) -> Tensor:
        return self.embedding_table(y)


class PlainSiT(nn.Module):
    """net(x, t, y) in SiT's time, 0 noise and 1 data."""

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        channels: int,
        dim: int,
        depth: int,
        heads: int,
        alpha_min: float,
        labels: int,
    ) -> None:
        super().__init__()
        self.channels, self.alphas = channels, alphas(depth, alpha_min)
        self.x_embedder = PatchEmbed(patch_size, channels, dim)
        self.t_embedder = TimestepEmbedder(dim)
        self.y_embedder = LabelEmbedder(labels, dim)
        self.pos_embed = nn.Parameter(torch.zeros(1, (image_size // patch_size) ** 2, dim), requires_grad=False)
        self.enc_blocks = nn.ModuleList([SiTBlock(dim, heads, skip=False) for _ in range(depth // 2)])
        self.dec_blocks = nn.ModuleList([SiTBlock(dim, heads, skip=True) for _ in range(depth // 2)])
        self.final_layer = FinalLayer(dim, patch_size**2 * channels)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = self.x_embedder(x) + self.pos_embed
        c = self.t_embedder(t) + self.y_embedder(y)
        skips, alpha = [], iter(self.alphas)
        for block in self.enc_blocks:
            x = block(x, c, next(alpha))
            skips.append(x)
        for block in self.dec_blocks:
            x = block(x, c, next(alpha), skips.pop())
        return unpatchify(self.final_layer(x, c), self.channels)
