"""Small models of other libraries, each with a copy of its forward in which the shortcuts are edited."""

from __future__ import annotations

import copy

import torch
from diffusers import DiTTransformer2DModel
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import silu

from uvit_decay import decay

DEPTH = 3


class Case:
    """A model and its inputs; `edited` is its forward with alpha x + beta f, written out, on a copy without hooks."""

    per_block = 2

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.reference, self.x = model, copy.deepcopy(model), x

    def to(self, dtype: torch.dtype) -> None:
        self.model, self.reference, self.x = self.model.to(dtype), self.reference.to(dtype), self.x.to(dtype)

    def __call__(self, model: nn.Module | None = None, scale: float = 1.0) -> Tensor:
        return (self.model if model is None else model)(scale * self.x)

    def weights(self, alpha_min: float, **options) -> decay.Shortcuts:
        """Return the alphas and betas of the branches."""
        return decay.shortcuts(len(self.blocks()), alpha_min, **options, per_block=self.per_block)


class TimmViT(Case):
    def __init__(self, model: VisionTransformer | None = None, size: int = 32, batch: int = 2) -> None:
        sizes = {"embed_dim": 48, "num_heads": 2, "num_classes": 10}
        model = model or VisionTransformer(32, 8, depth=DEPTH, init_values=0.5, **sizes).eval()
        super().__init__(model, torch.randn(batch, 3, size, size))
        self.pairs = [(f"blocks.{i}.norm{j}", f"blocks.{i}.drop_path{j}") for i in range(DEPTH) for j in (1, 2)]

    def blocks(self) -> list[nn.Module]:
        return list(self.model.blocks)

    def edited(self, alphas, betas=None, states=None) -> Tensor:
        betas = betas or (1.0,) * len(alphas)
        vit = self.reference
        x = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(self.x))))
        for i, block in enumerate(vit.blocks):
            f = block.drop_path1(block.ls1(block.attn(block.norm1(x))))
            x = alphas[2 * i] * x + betas[2 * i] * f
            f = block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
            x = alphas[2 * i + 1] * x + betas[2 * i + 1] * f
            if states is not None:
                states.append(x)
        return vit.forward_head(vit.norm(x))


class DiffusersDiT(Case):
    def __init__(self) -> None:
        sizes = {"num_layers": DEPTH, "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_embeds_ada_norm": 10}
        model = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=16, **sizes).eval()
        super().__init__(model, torch.randn(2, 4, 8, 8))
        self.t, self.y = torch.tensor([3, 700]), torch.tensor([1, 9])
        self.pairs = [decay.Gated(f"transformer_blocks.{i}", ("norm1", "norm3")) for i in range(DEPTH)]

    def __call__(self, model=None, scale: float = 1.0) -> Tensor:
        model = self.model if model is None else model
        return model(scale * self.x, timestep=self.t, class_labels=self.y).sample

    def blocks(self) -> list[nn.Module]:
        return list(self.model.transformer_blocks)

    def edited(self, alphas, betas=None, states=None) -> Tensor:
        betas = betas or (1.0,) * len(alphas)
        dit, t, y = self.reference, self.t, self.y
        x = dit.pos_embed(self.x)
        for i, block in enumerate(dit.transformer_blocks):
            inner, gate, shift2, scale2, gate2 = block.norm1(x, t, y, hidden_dtype=x.dtype)
            x = alphas[2 * i] * x + betas[2 * i] * gate.unsqueeze(1) * block.attn1(inner)
            inner = block.norm3(x) * (1 + scale2[:, None]) + shift2[:, None]
            x = alphas[2 * i + 1] * x + betas[2 * i + 1] * gate2.unsqueeze(1) * block.ff(inner)
            if states is not None:
                states.append(x)
        condition = dit.transformer_blocks[0].norm1.emb(t, y, hidden_dtype=x.dtype)
        shift, scale = dit.proj_out_1(silu(condition)).chunk(2, dim=1)
        x = dit.proj_out_2(dit.norm_out(x) * (1 + scale[:, None]) + shift[:, None])
        x = x.reshape(-1, 4, 4, 2, 2, 4)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(-1, 4, 8, 8)


class TorchEncoder(Case):
    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True)
        model = nn.TransformerEncoder(layer, DEPTH, norm=nn.LayerNorm(16), enable_nested_tensor=False).eval()
        for parameter in model.parameters():  # the layers are copies of one: let them differ
            nn.init.normal_(parameter, 0.2, 0.3)
        super().__init__(model, torch.randn(2, 6, 16))
        self.pairs = [(f"layers.{i}.norm{j}", f"layers.{i}.dropout{j}") for i in range(DEPTH) for j in (1, 2)]

    def blocks(self) -> list[nn.Module]:
        return list(self.model.layers)

    def edited(self, alphas, betas=None, states=None, scales=None) -> Tensor:
        betas, scales = betas or (1.0,) * len(alphas), scales or (1.0,) * len(alphas)
        x = self.x
        for i, layer in enumerate(self.reference.layers):
            n = scales[2 * i] * layer.norm1(x)
            x = alphas[2 * i] * x + betas[2 * i] * layer.self_attn(n, n, n, need_weights=False)[0]
            f = layer.linear2(layer.activation(layer.linear1(scales[2 * i + 1] * layer.norm2(x))))
            x = alphas[2 * i + 1] * x + betas[2 * i + 1] * f
            if states is not None:
                states.append(x)
        return self.reference.norm(x)


MODELS = {"timm": TimmViT, "diffusers": DiffusersDiT, "torch": TorchEncoder}


def hooks(model: nn.Module) -> int:
    """Return the number of hooks that are registered in the whole model."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
