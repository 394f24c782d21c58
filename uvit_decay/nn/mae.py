"""Masked autoencoder (He et al., CVPR 2022) with decayed identity shortcuts in its encoder.

Wiring `official` is the published network: the decoder reads the projected latent, with mask tokens at the removed
patches. Wiring `decayed` is from the code of the decay's authors. Its decoder starts from positions alone and reads the
image through SkipLayers, one for every second block of the encoder (Sec. 4 of the paper); the encoder has no final
norm, and residual branches start at 0. These parts are also single options, for the rows of the paper's Table 3.

Names, shapes and initialisation are the published ones. Official state_dicts load with strict=True, apart from
SkipLayers that no decoder block reads. With alpha_min = 1 the function is the same. The decoder is never decayed.

b = batch, n = patches, v = visible patches, d = width of the encoder, e = width of the decoder, k = p * p * c values
of a patch, L = depth of the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from einops import repeat
from jaxtyping import Float, Int
from torch import Tensor, nn

from uvit_decay import decay
from uvit_decay.nn.arguments import Wiring, collect_arguments
from uvit_decay.nn.base import DataLayers
from uvit_decay.nn.embed import Pixels, patchify, unpatchify
from uvit_decay.nn.layers import MlpType, NormType
from uvit_decay.nn.long_skips import MergeWeights, SkipGate, SkipPlan, SkipScale, scale_skip
from uvit_decay.nn.vit import EPS, Encoder, positions
from uvit_decay.runtime.precision import without_autocast
from uvit_decay.terminal.errors import UserError, check_numbers, check_whole, require_shape
from uvit_decay.terminal.typed import check_types

DecoderInput = Literal["latent", "positions"]
Visible = Float[Tensor, "b seen d"]  # tokens [class, visible patches]
Output = tuple[Float[Tensor, "b n k"], Float[Tensor, "b n"]]  # predicted patches and the mask


class Masking(NamedTuple):
    """Random masks: `visible` are the indices of kept patches, `restore` is the inverse of the whole shuffle."""

    visible: Int[Tensor, "b v"]
    restore: Int[Tensor, "b n"]

    @property
    def mask(self) -> Float[Tensor, "b n"]:
        """1 at removed patches, 0 at visible ones."""
        return (self.restore >= self.visible.shape[1]).float()


class SkipLayer(nn.Module):
    """Long skip from an encoder block to a decoder block: y + W2 SiLU(W1 [s, y]).

    s are the encoder's tokens, with a mask token of this layer at removed patches.
    """

    def __init__(self, dim: int, decoder_dim: int) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        self.fc = nn.Sequential(
            nn.Linear(dim + decoder_dim, decoder_dim), nn.SiLU(), nn.Linear(decoder_dim, decoder_dim)
        )

    def forward(
        self,
        state: Visible,
        y: Float[Tensor, "b all e"],
        restore: Int[Tensor, "b n"],
        weights: MergeWeights | None = None,
        gate: SkipGate | None = None,
    ) -> Float[Tensor, "b all e"]:
        """Merge the encoder's `state` [class, visible patches] into the decoder's tokens y [class, patches].

        Fixed `weights` scale the state before mask tokens enter. A learned `gate` reads all tokens [class, patches],
        because their order does not depend on the mask.
        """
        tokens = unshuffle(scale_skip(state, weights), self.mask_token, restore)
        if gate is not None:
            tokens = tokens * gate(tokens)
        both = torch.cat([tokens, y], dim=-1)
        return y + self.fc(both)


@check_types
class MAE(Encoder, pipeline_tag="image-feature-extraction"):
    """Masked autoencoder net(x, noise) -> (prediction, mask) for images (b, c, h, w) of about [-1, 1].

    Args:
        image_size: height and width in pixels. Null in a configuration means as the data, also for channels.
        patch_size: side of a patch.
        channels: 3 for RGB, 1 for grey, any number with `pixels` unit.
        dim: width d of the encoder, a multiple of 4.
        depth: number of blocks L of the encoder; even with skips.
        heads: attention heads of the encoder.
        mlp_ratio: hidden width of the MLPs over the width, in encoder and decoder.
        decoder_dim: width e of the decoder, a multiple of 4.
        decoder_depth: number of blocks of the decoder.
        decoder_heads: attention heads of the decoder.
        alpha_min: weight of the encoder's deepest identity shortcut, in (0, 1]; 1 is the ordinary encoder.
        schedule: how alpha falls with depth, see `uvit_decay.decay.shortcuts`.
        granularity: one alpha for each residual branch, or one for both branches of a block.
        index: how depth is counted; `code` runs from exactly 1 to exactly alpha_min.
        branches: decay both kinds of residual branches, or only one.
        wiring: `official` or `decayed` (the authors'); the default of the next four options if they are null.
        skips: SkipLayers from every second block of the encoder; the decoder's first block reads its last block.
        decoder_input: the projected `latent` with mask tokens, or `positions` alone, which needs skips.
        norm: layer norm of the encoder's output, part of the latent.
        zero_init: initialise residual branches, skips and the prediction to 0.
        norm_pix: predict normalised patches, each with mean 0 and variance 1.
        pixels: scale in which the network computes: `imagenet` (mean and standard deviation) or `unit`, [-1, 1].
        checkpointing: recompute blocks in the backward pass of training: less memory, more time; not reentrant.
        qk_norm: norm queries and keys, each head over its channels, with learnable scales (ViT-22B, SD3, timm).
        norm_type: kind of all norms, also of queries and keys: `layer` (official) or `rms`, RMSNorm.
        skip_scale: factor of the encoder's states in SkipLayers: a number, `kappa:0.7`, `learned`, `learned-each`,
            `stream` or `stream:0.8`, see `uvit_decay.nn.long_skips`; 1 is the authors' network.
        mlp: kind of the MLPs: `gelu` (official) or `swiglu`, gated, with two thirds of the hidden width (LightningDiT).
    """

    data_layers = DataLayers(("patch_embed", "decoder_pred"), ("pos_embed", "decoder_pos_embed"))

    def __init__(
        self,
        image_size: int | None = 224,
        patch_size: int = 16,
        channels: int | None = 3,
        dim: int = 768,
        depth: int = 12,
        heads: int = 12,
        mlp_ratio: float = 4.0,
        decoder_dim: int = 512,
        decoder_depth: int = 8,
        decoder_heads: int = 16,
        alpha_min: float = 1.0,
        schedule: decay.Schedule = "linear",
        granularity: decay.Granularity = "branch",
        index: decay.Index = "code",
        branches: decay.Branches = "both",
        wiring: Wiring = "official",
        skips: bool | None = None,
        decoder_input: DecoderInput | None = None,
        norm: bool | None = None,
        zero_init: bool | None = None,
        norm_pix: bool = True,
        pixels: Pixels = "imagenet",
        checkpointing: bool = False,
        qk_norm: bool = False,
        norm_type: NormType = "layer",
        skip_scale: SkipScale = 1.0,
        mlp: MlpType = "gelu",
    ) -> None:
        config = collect_arguments(locals())
        if wiring == "decayed":
            usual = {"skips": True, "decoder_input": "positions", "norm": False, "zero_init": True}
        else:
            usual = {"skips": False, "decoder_input": "latent", "norm": True, "zero_init": False}
        for name, value in usual.items():
            if config[name] is None:
                config[name] = value
        _check_decoder(config)
        super().__init__(config)
        self.pos_embed.requires_grad_(False)
        if config["norm"]:
            self.norm = self.factory.build_norm(dim, EPS)

        if config["decoder_input"] == "latent":
            self.mask_token = nn.Parameter(torch.empty(1, 1, decoder_dim))
            self.decoder_embed = nn.Linear(dim, decoder_dim)
        else:
            self.decoder_cls_token = nn.Parameter(torch.empty(1, 1, decoder_dim))
            self.decoder_embed = nn.Linear(decoder_dim, decoder_dim)
        self.decoder_pos_embed = nn.Parameter(positions(image_size // patch_size, decoder_dim), requires_grad=False)
        self.decoder_blocks = self.block_list(decoder_dim, decoder_heads, decoder_depth)
        # The authors also build SkipLayers that no decoder block reads, which DistributedDataParallel refuses.
        count = min(depth // 2, decoder_depth) if config["skips"] else 0
        self.skip = nn.ModuleList([SkipLayer(dim, decoder_dim) for _ in range(count)])
        self.decoder_norm = self.factory.build_norm(decoder_dim, EPS)
        self.decoder_pred = nn.Linear(decoder_dim, patch_size**2 * channels)
        self.init_weights()
        if config["zero_init"]:
            self._zero_init()
        self.connect()
        sources = tuple(depth - 2 * i for i in range(count))
        self.record_long_skips(SkipPlan(sources, (), 1 + self.patch_embed.tokens, every=2))

    def _zero_init(self) -> None:
        """Zero the last linear maps of all residual branches and skips, and the prediction (Sec. 3 of the paper)."""
        self.silence([*self.blocks])
        for block in self.decoder_blocks:
            block.zero_init()
        nn.init.zeros_(self.decoder_pred.weight)
        for layer in self.skip:
            nn.init.zeros_(layer.fc[2].weight)

    def forward(
        self,
        x: Float[Tensor, "b c h w"],
        noise: Float[Tensor, "b n"],
        mask_ratio: float = 0.75,
        layers: tuple[int, ...] = (),
    ) -> Output | tuple[Output, tuple[Visible, ...]]:
        """Return the predicted patches (b, n, k), in the scale of `targets`, and the mask (b, n), 1 at removed patches.

        Args:
            x: images (b, c, h, w) of about [-1, 1].
            noise: uniform random numbers (b, n); patches with the smallest numbers stay visible.
            mask_ratio: fraction of removed patches, in (0, 1).
            layers: if given, return ((patches, mask), token states [class, visible patches] of these layers of the
                encoder), see `HasIntermediates`.
        """
        masking = self.masking(noise, mask_ratio)
        tokens = self.embed(x)
        index = repeat(masking.visible + 1, "b v -> b v d", d=self.dim)
        seen = torch.cat([tokens[:, :1], tokens.gather(1, index)], dim=1)
        blocks = len(self.blocks)
        read_by_skips = [blocks - 2 * i for i in range(len(self.skip))]
        states = dict(self.run_blocks(seen, [*self.blocks], layers=(*read_by_skips, *layers)))
        y = self._decoder_tokens(states[blocks], masking.restore)
        for i, block in enumerate(self.decoder_blocks):
            # Decoder block i reads the state after encoder block L - 2 i: every second one, the last one first.
            if i < len(self.skip):
                y = self._merge_skip(i, states[read_by_skips[i]], y, masking.restore)
            y = self.run_block(block, y)
        with without_autocast(y):
            patches = self.decoder_pred(self.decoder_norm(y))[:, 1:]
            mask = masking.mask
        if not layers:
            return patches, mask
        return (patches, mask), tuple(states[layer] for layer in layers)

    def _merge_skip(
        self, i: int, state: Visible, y: Float[Tensor, "b all e"], restore: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b all e"]:
        """Return the decoder's tokens y after SkipLayer i has merged the encoder's `state`."""
        if self.long_skips is None:
            return self.skip[i](state, y, restore)
        gate = self.long_skips.gate(i)
        weights = self.long_skips(i, state) if gate is None else None
        return self.skip[i](state, y, restore, weights, gate)

    def masking(self, noise: Float[Tensor, "b n"], mask_ratio: float) -> Masking:
        """Return the masks: the floor(n (1 - mask_ratio)) patches with the smallest noise stay visible."""
        kept = visible_patches(noise.shape[1], mask_ratio)
        order = noise.argsort(dim=1, stable=True)
        return Masking(order[:, :kept], order.argsort(dim=1))

    def _decoder_tokens(self, state: Visible, restore: Int[Tensor, "b n"]) -> Float[Tensor, "b all e"]:
        """Return the input [class, patches] of the decoder's blocks."""
        if self.config["decoder_input"] == "positions":
            start = torch.cat([self.decoder_cls_token, self.decoder_pos_embed[:, 1:]], dim=1)
            return self.decoder_embed(start).to(start.dtype).expand(len(state), -1, -1)
        latent = self.norm(state) if self.config["norm"] else state
        y = self.decoder_embed(latent).to(state.dtype)
        return unshuffle(y, self.mask_token, restore) + self.decoder_pos_embed

    def targets(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n k"]:
        """Return the patches that the network predicts, each with mean 0 and variance 1 if `norm_pix`."""
        patches = patchify(self.scale.normalise(x), self.patch_size)
        if not self.config["norm_pix"]:
            return patches
        mean, std = _moments(patches)
        return (patches - mean) / std

    def reconstruction_loss(
        self, x: Float[Tensor, "b c h w"], prediction: Float[Tensor, "b n k"], mask: Float[Tensor, "b n"]
    ) -> Float[Tensor, ""]:
        """Return the mean squared error of the removed patches."""
        targets = self.targets(x)
        require_shape(targets.shape, prediction=prediction)
        require_shape(targets.shape[:2], mask=mask)
        error = (prediction - targets).square().mean(dim=-1)
        return (error * mask).sum() / mask.sum()

    def reconstruct(self, x: Float[Tensor, "b c h w"], prediction: Float[Tensor, "b n k"]) -> Float[Tensor, "b c h w"]:
        """Return predicted patches as images of about [-1, 1]; with `norm_pix` they get the mean and variance of x."""
        if self.config["norm_pix"]:
            patches = patchify(self.scale.normalise(x), self.patch_size)
            mean, std = _moments(patches)
            prediction = prediction * std + mean
        return self.scale.denormalise(unpatchify(prediction, self.channels))


def visible_patches(patches: int, mask_ratio: float) -> int:
    """Return the number of visible patches; raise a UserError if it is 0 or if no patch is removed."""
    check_numbers("(0, 1)", mask_ratio=mask_ratio)
    kept = int(patches * (1 - mask_ratio))
    if not 0 < kept < patches:
        line = f"{mask_ratio} leaves {kept} of {patches} patches visible: keep some patches, and remove some"
        raise UserError(line, argument="mask_ratio")
    return kept


def unshuffle(
    state: Visible, mask_token: Float[Tensor, "1 1 d"], restore: Int[Tensor, "b n"]
) -> Float[Tensor, "b all d"]:
    """Return the state [class, visible patches] as tokens [class, all patches], with mask tokens at removed patches."""
    count = restore.shape[1] + 1 - state.shape[1]
    removed = mask_token.to(state.dtype).expand(len(state), count, -1)
    shuffled = torch.cat([state[:, 1:], removed], dim=1)
    index = repeat(restore, "b n -> b n d", d=state.shape[2])
    return torch.cat([state[:, :1], shuffled.gather(1, index)], dim=1)


def _moments(patches: Float[Tensor, "b n k"]) -> tuple[Float[Tensor, "b n 1"], Float[Tensor, "b n 1"]]:
    """Return mean and standard deviation of each patch, from the unbiased variance plus 1e-6 as published."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return mean, (variance + 1e-6).sqrt()


def _check_decoder(config: Mapping[str, Any]) -> None:
    """Raise a UserError if sizes of the decoder are out of range, or if options contradict each other."""
    check_whole(1, 2**16, decoder_dim=config["decoder_dim"], decoder_heads=config["decoder_heads"])
    check_whole(1, 1000, decoder_depth=config["decoder_depth"])
    if config["norm_pix"] and config["patch_size"] == config["channels"] == 1:
        raise UserError("norm_pix: patches of a single value have no variance; set `norm_pix` to false")
    if config["decoder_input"] == "positions" and not config["skips"]:
        raise UserError(
            "decoder_input positions: without skips the decoder cannot see the image; "
            "set `decoder_input` to latent, or `skips` to true"
        )
    if config["decoder_input"] == "positions" and config["norm"]:
        raise UserError("norm is part of the latent, which decoder_input positions does not read; set `norm` to false")
    if config["skips"] and config["depth"] % 2:
        raise UserError(f"skips start from every second block, so `depth` must be even, got {config['depth']}")
