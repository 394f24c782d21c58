"""Vision transformer with decayed identity shortcuts: the encoder of an MAE, with a linear classifier or without one.

Names and shapes are the same as in timm and in MAE's code: an official state_dict loads with strict=True, and with
alpha_min = 1 the function is the same. Tokens are [class, patches]; positions are initialised with fixed sines and
cosines. alpha runs over the 2 depth residual branches in execution order. Blocks, norms and heads follow MAE (He et
al., CVPR 2022): eps 1e-6, biases in the attention, exact GELU.

b = batch, n = patches, d = width, L = depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay import decay
from uvit_decay.nn.arguments import check_sizes, collect_arguments
from uvit_decay.nn.base import DecayedNet
from uvit_decay.nn.block import Block, Tokens, init_linears
from uvit_decay.nn.embed import PatchEmbed, Pixels, PixelScale, sincos_positions
from uvit_decay.nn.inputs import check_images
from uvit_decay.nn.intermediates import block_layers
from uvit_decay.nn.layers import LayerFactory, MlpType, NormType
from uvit_decay.runtime.precision import without_autocast
from uvit_decay.terminal.typed import check_types

HeadPool = Literal["cls", "mean"]
EPS = 1e-6  # of all norms
DECAY = ("alpha_min", "schedule", "granularity", "index", "branches")  # arguments of `decay.shortcuts`


class Encoder(DecayedNet):
    """Encoder with tokens [class, patches] and decayed blocks (abstract); `config` has the subclass's arguments."""

    num_classes = 0
    null_label = False
    num_prefix_tokens = 1
    class_token = True

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        check_sizes({"num_classes": 0, **config})
        self.config = config
        self.factory = LayerFactory.of(config)
        self.checkpointing = config["checkpointing"]
        self.image_size = config["image_size"]
        self.patch_size = config["patch_size"]
        self.channels = config["channels"]
        self.dim = config["dim"]
        self.scale = PixelScale.of(config["pixels"], self.channels)

        self.patch_embed = PatchEmbed(self.image_size, self.patch_size, self.channels, self.dim)
        self.cls_token = nn.Parameter(torch.empty(1, 1, self.dim))
        self.pos_embed = nn.Parameter(positions(self.image_size // self.patch_size, self.dim))
        self.blocks = self.block_list(self.dim, config["heads"], config["depth"])
        options = {name: config[name] for name in DECAY}
        self.record_shortcuts(decay.shortcuts(len(self.blocks), **options))
        self.layers = block_layers(self.find_decayed_blocks(), denoiser=False)

    def block_list(self, dim: int, heads: int, depth: int) -> nn.ModuleList:
        """Return `depth` new blocks of width `dim`, for the encoder or the decoder."""
        return nn.ModuleList([Block(dim, heads, self.factory, qkv_bias=True, eps=EPS) for _ in range(depth)])

    def init_weights(self) -> None:
        """Initialise as MAE: xavier-uniform linear maps with biases 0, class and mask tokens normal(0, 0.02)."""
        init_linears(self, nn.init.xavier_uniform_)
        nn.init.xavier_uniform_(self.patch_embed.proj.weight.detach().flatten(1))  # a view: one linear map of a patch
        for name, parameter in self.named_parameters():
            if name.endswith(("cls_token", "mask_token")):
                nn.init.normal_(parameter, std=0.02)

    def layer_id(self, name: str) -> int:
        """Return the depth of a parameter for layer-wise learning rates: 0 embeddings, i + 1 block i, L + 1 others."""
        if name in ("cls_token", "pos_embed") or name.startswith("patch_embed."):
            return 0
        if name.startswith("blocks."):
            return int(name.split(".")[1]) + 1
        return len(self.blocks) + 1

    def forward_intermediates(self, x: Float[Tensor, "b c h w"]) -> Iterator[Tokens]:
        """Yield the token states [class, patches] after the embeddings and after every block (`layers`), unnormed."""
        return (tokens for _, tokens in self.run_blocks(self.embed(x), [*self.blocks]))

    def embed(self, x: Float[Tensor, "b c h w"]) -> Tokens:
        """Return the embedded tokens [class, patches] with their positions."""
        check_images(self, x)
        patches = self.patch_embed(self.scale.normalise(x)) + self.pos_embed[:, 1:]
        class_token = self.cls_token + self.pos_embed[:, :1]
        return torch.cat([class_token.expand(len(x), -1, -1), patches], dim=1)


@check_types
class ViT(Encoder, pipeline_tag="image-feature-extraction"):
    """Vision transformer net(x) -> (b, num_classes) logits of images (b, c, h, w) of about [-1, 1].

    Args:
        image_size: height and width in pixels. Null in a configuration means as the data, also for channels
            and num_classes.
        patch_size: side of a patch.
        channels: 3 for RGB, 1 for grey, any number with `pixels` unit.
        dim: width d of the tokens, a multiple of 4.
        depth: number of blocks L.
        heads: attention heads.
        mlp_ratio: hidden width of the MLPs over d.
        num_classes: K classes of the linear head; 0 for an encoder without head.
        pool: input of the head: the class token (`cls`) after `norm`, or the mean of patch tokens after `fc_norm`.
        norm: layer norm of the tokens after the last block, for `cls` (an MAE of the decay's authors has no such norm).
            A classifier with pool `mean` always has `fc_norm`.
        batch_norm: batch norm without weights before the head, as in MAE's linear probe.
        alpha_min: weight of the deepest identity shortcut, in (0, 1]; 1 is the ordinary network.
        schedule: how alpha falls with depth, see `uvit_decay.decay.shortcuts`.
        granularity: one alpha for each residual branch, or one for both branches of a block.
        index: how depth is counted; `code` runs from exactly 1 to exactly alpha_min.
        branches: decay both kinds of residual branches, or only one.
        zero_init: initialise residual branches to output 0.
        pixels: scale in which the network computes: `imagenet` (mean and standard deviation) or `unit`, [-1, 1].
        checkpointing: recompute blocks in the backward pass of training: less memory, more time; not reentrant.
        qk_norm: norm queries and keys, each head over its channels, with learnable scales (ViT-22B, SD3, timm).
        norm_type: kind of all norms, also of queries and keys: `layer` (official) or `rms`, RMSNorm.
        mlp: kind of the MLPs: `gelu` (official) or `swiglu`, gated, with two thirds of the hidden width (LightningDiT).
    """

    def __init__(
        self,
        image_size: int | None = 224,
        patch_size: int = 16,
        channels: int | None = 3,
        dim: int = 768,
        depth: int = 12,
        heads: int = 12,
        mlp_ratio: float = 4.0,
        num_classes: int | None = 0,
        pool: HeadPool = "cls",
        norm: bool = True,
        batch_norm: bool = False,
        alpha_min: float = 1.0,
        schedule: decay.Schedule = "linear",
        granularity: decay.Granularity = "branch",
        index: decay.Index = "code",
        branches: decay.Branches = "both",
        zero_init: bool = False,
        pixels: Pixels = "imagenet",
        checkpointing: bool = False,
        qk_norm: bool = False,
        norm_type: NormType = "layer",
        mlp: MlpType = "gelu",
    ) -> None:
        config = collect_arguments(locals())
        super().__init__(config)
        self.num_classes = num_classes
        self.pool = pool
        if norm and pool == "cls":
            self.norm = self.factory.build_norm(dim, EPS)
        if num_classes:
            if pool == "mean":
                self.fc_norm = self.factory.build_norm(dim, EPS)
            head: nn.Module = nn.Linear(dim, num_classes)
            if batch_norm:
                head = nn.Sequential(nn.BatchNorm1d(dim, eps=1e-6, affine=False), head)
            self.head = head
        self.init_weights()
        if zero_init:
            self.silence([*self.blocks])
        self.connect()

    @property
    def linear_head(self) -> nn.Linear:
        """The linear layer of the classifier."""
        return self.head[1] if self.config["batch_norm"] else self.head

    def forward(
        self, x: Float[Tensor, "b c h w"], keep: Float[Tensor, "branches b"] | None = None
    ) -> Float[Tensor, "b classes"]:
        """Return logits; `keep` multiplies the outputs of the 2 L branches, for stochastic depth."""
        return self.classify(self.pooled(x, keep))

    def classify(self, features: Float[Tensor, "b d"]) -> Float[Tensor, "b classes"]:
        """Return the logits of pooled features."""
        with without_autocast(features):
            return self.head(features)

    def pooled(
        self, x: Float[Tensor, "b c h w"], keep: Float[Tensor, "branches b"] | None = None
    ) -> Float[Tensor, "b d"]:
        """Return the input of the head: the normed class token, or the normed mean of the patch tokens."""
        states = dict(self.run_blocks(self.embed(x), [*self.blocks], layers=(), keep=keep))
        tokens = states[len(self.blocks)]
        if self.pool == "cls":
            if self.config["norm"]:
                tokens = self.norm(tokens)
            return tokens[:, 0]
        mean = tokens[:, 1:].mean(dim=1)
        return self.fc_norm(mean) if self.num_classes else mean


def positions(side: int, dim: int) -> Float[Tensor, "1 n d"]:
    """Return fixed position embeddings (1, n, d) of a class token, which are 0, and of side * side patches."""
    class_token = torch.zeros(1, dim)
    return torch.cat([class_token, sincos_positions(side, dim)])[None]
