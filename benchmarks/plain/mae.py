"""The decayed MAE with its SkipLayers as its authors' code computes it, with normalised patches as targets."""

from __future__ import annotations

import einops
import torch
from torch import Tensor, nn

from benchmarks.plain.blocks import Block, PatchEmbed, alphas


def unshuffle(x: Tensor, mask_token: Tensor, ids_restore: Tensor) -> Tensor:
    """Append mask tokens and put the patches back in their places, behind the class token."""
    mask_tokens = mask_token.repeat(x.shape[0], ids_restore.shape[1] + 1 - x.shape[1], 1)
    patches = torch.cat([x[:, 1:, :], mask_tokens], dim=1)
    patches = torch.gather(patches, dim=1, index=ids_restore.unsqueeze(-1).repeat(1, 1, x.shape[2]))
    return torch.cat([x[:, :1, :], patches], dim=1)


class SkipLayer(nn.Module):
    def __init__(self, dim: int, decoder_dim: int) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.fc = nn.Sequential(
            nn.Linear(dim + decoder_dim, decoder_dim), nn.SiLU(), nn.Linear(decoder_dim, decoder_dim)
        )

    def forward(self, state: Tensor, y: Tensor, ids_restore: Tensor) -> Tensor:
        return y + self.fc(torch.cat([unshuffle(state, self.mask_token, ids_restore), y], dim=-1))


class PlainMAE(nn.Module):
    """net(images, noise) -> loss; images are standardised."""

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        dim: int,
        depth: int,
        heads: int,
        decoder_dim: int,
        decoder_depth: int,
        decoder_heads: int,
        alpha_min: float,
    ) -> None:
        super().__init__()
        tokens = 1 + (image_size // patch_size) ** 2
        self.patch_size, self.alphas = patch_size, alphas(depth, alpha_min)
        self.patch_embed = PatchEmbed(patch_size, 3, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, dim), requires_grad=False)
        self.blocks = nn.ModuleList([Block(dim, heads, mae=True) for _ in range(depth)])
        self.decoder_cls_token = nn.Parameter(torch.zeros(1, 1, decoder_dim))
        self.decoder_pos_embed = nn.Parameter(torch.zeros(1, tokens, decoder_dim), requires_grad=False)
        self.decoder_embed = nn.Linear(decoder_dim, decoder_dim)
        self.decoder_blocks = nn.ModuleList([Block(decoder_dim, decoder_heads, mae=True) for _ in range(decoder_depth)])
        self.skip = nn.ModuleList([SkipLayer(dim, decoder_dim) for _ in range(min(depth // 2, decoder_depth))])
        self.decoder_norm = nn.LayerNorm(decoder_dim, 1e-6)
        self.decoder_pred = nn.Linear(decoder_dim, patch_size**2 * 3)

    def forward(self, images: Tensor, noise: Tensor, mask_ratio: float = 0.75) -> Tensor:
        x = self.patch_embed(images) + self.pos_embed[:, 1:, :]
        kept = int(x.shape[1] * (1 - mask_ratio))
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        x = torch.gather(x, dim=1, index=ids_shuffle[:, :kept].unsqueeze(-1).repeat(1, 1, x.shape[2]))
        mask = torch.ones_like(noise)
        mask[:, :kept] = 0
        mask = torch.gather(mask, dim=1, index=ids_restore)

        x = torch.cat(((self.cls_token + self.pos_embed[:, :1, :]).expand(x.shape[0], -1, -1), x), dim=1)
        states = []
        for block, alpha in zip(self.blocks, self.alphas, strict=True):
            x = block(x, alpha)
            states.append(x)

        start = torch.cat([self.decoder_cls_token, self.decoder_pos_embed[:, 1:, :]], dim=1)
        y = self.decoder_embed(start).expand(x.shape[0], -1, -1)
        for i, block in enumerate(self.decoder_blocks):
            if i < len(self.skip):
                y = self.skip[i](states[len(states) - 1 - 2 * i], y, ids_restore)
            y = block(y)
        return self.loss(images, self.decoder_pred(self.decoder_norm(y))[:, 1:, :], mask)

    def loss(self, images: Tensor, prediction: Tensor, mask: Tensor) -> Tensor:
        p = self.patch_size
        target = einops.rearrange(images, "B C (h p) (w q) -> B (h w) (p q C)", p=p, q=p)
        mean, variance = target.mean(dim=-1, keepdim=True), target.var(dim=-1, keepdim=True)
        target = (target - mean) / (variance + 1e-6) ** 0.5
        error = ((prediction - target) ** 2).mean(dim=-1)
        return (error * mask).sum() / mask.sum()
