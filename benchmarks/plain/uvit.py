"""U-ViT as its official code computes it, with decayed shortcuts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.plain.blocks import Block, PatchEmbed, alphas, timestep_embedding, unpatchify


class PlainUViT(nn.Module):
    """net(x, 999 t, y), with the official names of parameters."""

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        channels: int,
        dim: int,
        depth: int,
        heads: int,
        alpha_min: float,
        labels: int = 0,
    ) -> None:
        super().__init__()
        self.channels, self.dim, self.extras = channels, dim, 2 if labels else 1
        self.alphas = alphas(depth + 1, alpha_min)
        self.patch_embed = PatchEmbed(patch_size, channels, dim)
        self.label_emb = nn.Embedding(labels, dim) if labels else None
        self.pos_embed = nn.Parameter(torch.zeros(1, self.extras + (image_size // patch_size) ** 2, dim))
        self.in_blocks = nn.ModuleList([Block(dim, heads) for _ in range(depth // 2)])
        self.mid_block = Block(dim, heads)
        self.out_blocks = nn.ModuleList([Block(dim, heads, skip=True) for _ in range(depth // 2)])
        self.norm = nn.LayerNorm(dim)
        self.decoder_pred = nn.Linear(dim, patch_size**2 * channels)
        self.final_layer = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, timesteps: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.patch_embed(x)
        time_token = timestep_embedding(timesteps, self.dim).unsqueeze(dim=1)
        x = torch.cat((time_token, x), dim=1)
        if y is not None:
            x = torch.cat((self.label_emb(y).unsqueeze(dim=1), x), dim=1)
        x = x + self.pos_embed

        skips, alpha = [], iter(self.alphas)
        for block in self.in_blocks:
            x = block(x, next(alpha))
            skips.append(x)
        x = self.mid_block(x, next(alpha))
        for block in self.out_blocks:
            x = block(x, next(alpha), skips.pop())
        x = self.decoder_pred(self.norm(x))
        return self.final_layer(unpatchify(x[:, self.extras :, :], self.channels))
