"""U-ViT (Bao et al., CVPR 2023) with decayed identity shortcuts; alpha_min = 1 is the baseline.

Token order is [time, patches] or, with labels, [label, time, patches]. `depth`/2 input blocks, one middle block and
`depth`/2 output blocks, each output block reading the input block of its height (last in, first out). alpha runs over
the 2 (depth + 1) residual branches in execution order, through the end of the decoder. Names, shapes and initialisation
are the official ones: an official state_dict loads with strict=True, and with alpha_min = 1 the function is the same.

b = batch, n = tokens, d = width. Time t is in [0, 1], t = 1 noise; the network embeds time_scale t (officially 999 t).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from uvit_decay import decay
from uvit_decay.nn.arguments import check_sizes, collect_arguments
from uvit_decay.nn.base import DataLayers, DecayedNet
from uvit_decay.nn.block import Block, Tokens, init_linears
from uvit_decay.nn.embed import PatchEmbed, timestep_embedding, unpatchify
from uvit_decay.nn.inputs import check_images, check_times
from uvit_decay.nn.intermediates import block_layers
from uvit_decay.nn.layers import LayerFactory, MlpType, NormType
from uvit_decay.nn.long_skips import SkipScale, plan_mirrored_skips
from uvit_decay.nn.output_skip import OutputSkipKind, build_output_skip
from uvit_decay.runtime.precision import without_autocast
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Within, check_types


@check_types
class UViT(DecayedNet, pipeline_tag="unconditional-image-generation"):
    """U-ViT denoiser net(x, t, y) -> (b, c, h, w): images of about [-1, 1], times (b,) in [0, 1], labels (b,) int64.

    Args:
        image_size: height and width in pixels, or in latent cells. Null in a configuration means as the
            data, also for channels and num_classes.
        patch_size: side of a patch.
        channels: 3 for RGB, 1 for grey, 4 for the latents of a Stable Diffusion autoencoder.
        dim: width d of the tokens.
        depth: number of input plus output blocks, even; the network has depth + 1 blocks.
        heads: attention heads.
        mlp_ratio: hidden width of the MLPs over d.
        num_classes: K real classes; 0 for an unconditional network.
        null_label: add a row K to the label table that means "no label" (guidance needs it).
        alpha_min: weight of the deepest identity shortcut, in (0, 1]; 1 is the ordinary U-ViT.
        schedule: how alpha falls with depth, see `uvit_decay.decay.shortcuts`.
        granularity: one alpha for each residual branch, or one for both branches of a block.
        index: how depth is counted; `code` runs from exactly 1 to exactly alpha_min.
        branches: decay both kinds of residual branches, or only one.
        zero_init: initialise residual branches to output 0; null means only if an alpha is below 1, or alpha_min. Set
            it to compare runs of several alpha_min; false is the official initialisation.
        init: `official` (normal 0.02, for S and up) or `xavier`, which trains far better at a width of about 64.
        skip: the long skips between input and output blocks.
        conv: the final 3x3 convolution (all official sizes but H).
        mlp_time_embed: an MLP on the time embedding (no official configuration uses it).
        qkv_bias: biases in the attention's input map.
        time_scale: factor of t before its embedding: 999 for continuous VP, 1000 for Stable Diffusion's schedule.
        checkpointing: recompute blocks in the backward pass of training: less memory, more time; not reentrant.
        qk_norm: norm queries and keys, each head over its channels, with learnable scales (ViT-22B, SD3, timm).
        norm_type: kind of all norms, also of queries and keys: `layer` (official) or `rms`, RMSNorm.
        skip_scale: factor of the long skips: a number, `kappa:0.7`, `learned`, `learned-each`, `stream` or
            `stream:0.8`, see `uvit_decay.nn.long_skips`; 1 is the official network.
        output_skip: `none`, or `learned`: return a(t) x + b(t) times the prediction, with learned a and b that start at
            0 and 1, see `uvit_decay.nn.output_skip`.
        mlp: kind of the MLPs: `gelu` (official) or `swiglu`, gated, with two thirds of the hidden width (LightningDiT).
    """

    data_layers = DataLayers(("patch_embed", "decoder_pred", "final_layer"), ("pos_embed",), "label_emb.weight")

    def __init__(
        self,
        image_size: int | None = 32,
        patch_size: int = 2,
        channels: int | None = 3,
        dim: int = 512,
        depth: int = 12,
        heads: int = 8,
        mlp_ratio: float = 4.0,
        num_classes: int | None = 0,
        null_label: bool = True,
        alpha_min: float = 1.0,
        schedule: decay.Schedule = "linear",
        granularity: decay.Granularity = "branch",
        index: decay.Index = "code",
        branches: decay.Branches = "both",
        zero_init: bool | None = None,
        init: Literal["official", "xavier"] = "official",
        skip: bool = True,
        conv: bool = True,
        mlp_time_embed: bool = False,
        qkv_bias: bool = False,
        time_scale: Annotated[float, Within("(0, 1000000]")] = 999.0,
        checkpointing: bool = False,
        qk_norm: bool = False,
        norm_type: NormType = "layer",
        skip_scale: SkipScale = 1.0,
        output_skip: OutputSkipKind = "none",
        mlp: MlpType = "gelu",
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] = collect_arguments(locals())
        check_sizes(self.config)
        if depth % 2:
            raise UserError(f"`depth` must be even, because input and output blocks come in pairs, got {depth}")
        self.image_size = image_size
        self.channels = channels
        self.num_classes = num_classes
        self.null_label = null_label and num_classes > 0
        self.num_prefix_tokens = 2 if num_classes > 0 else 1
        self.dim = dim
        self.time_scale = time_scale
        self.checkpointing = checkpointing

        self.patch_embed = PatchEmbed(image_size, patch_size, channels, dim)
        self.time_embed = nn.Identity()
        if mlp_time_embed:
            self.time_embed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))
        if num_classes:
            self.label_emb = nn.Embedding(num_classes + self.null_label, dim)
        self.pos_embed = nn.Parameter(torch.zeros(1, self.num_prefix_tokens + self.patch_embed.tokens, dim))
        factory = LayerFactory.of(self.config)
        block = partial(Block, dim, heads, factory, qkv_bias)
        self.in_blocks = nn.ModuleList([block() for _ in range(depth // 2)])
        self.mid_block = block()
        self.out_blocks = nn.ModuleList([block(skip=skip) for _ in range(depth // 2)])
        self.norm = factory.build_norm(dim, eps=1e-5)
        self.decoder_pred = nn.Linear(dim, patch_size**2 * channels)
        self.final_layer = nn.Conv2d(channels, channels, 3, padding=1) if conv else nn.Identity()

        self.record_shortcuts(decay.shortcuts(depth + 1, alpha_min, schedule, granularity, index, branches))
        self.layers = block_layers(self.find_decayed_blocks(), denoiser=True)
        _INITS[init](self)
        if zero_init is None:
            zero_init = min(alpha_min, *self.shortcuts.alphas) < 1.0
        if zero_init:
            self.silence(self.blocks())
        self.connect(has_time=True)
        self.record_long_skips(plan_mirrored_skips(depth + 1, depth // 2 * skip, self.pos_embed.shape[1]))
        self.output_skip = build_output_skip(self.config, dim)

    def blocks(self) -> list[Block]:
        """Return all blocks in execution order."""
        return [*self.in_blocks, self.mid_block, *self.out_blocks]

    def forward(
        self,
        x: Float[Tensor, "b c h w"],
        t: Float[Tensor, " b"],
        y: Int[Tensor, " b"] | None = None,
        layers: tuple[int, ...] = (),
    ) -> Float[Tensor, "b c h w"] | tuple[Float[Tensor, "b c h w"], tuple[Tokens, ...]]:
        """Return the prediction; with `layers` also the token states of these layers, see `HasIntermediates`.

        Raises:
            UserError: images of another shape, or at the first call times outside of [0, 1].
        """
        check_images(self, x)
        check_times(self, t)
        time = self.embed_time(t)
        states = dict(self._states(x, time, y, layers))
        tokens = states[len(self.layers) - 1]
        with without_autocast(tokens):
            patches = self.decoder_pred(self.norm(tokens))[:, self.num_prefix_tokens :]
            output = self.final_layer(unpatchify(patches, self.channels))
        if self.output_skip is not None:
            output = self.output_skip(x, output, time)
        return (output, tuple(states[layer] for layer in layers)) if layers else output

    def forward_intermediates(
        self, x: Float[Tensor, "b c h w"], t: Float[Tensor, " b"], y: Int[Tensor, " b"] | None = None
    ) -> Iterator[Tokens]:
        """Yield the token states after the embeddings and after every block (`layers`); y = None is the null label."""
        check_images(self, x)
        check_times(self, t)
        return (tokens for _, tokens in self._states(x, self.embed_time(t), y))

    def _states(
        self, x: Tensor, time: Float[Tensor, "b d"], y: Tensor | None, layers: Collection[int] | None = None
    ) -> Iterator[tuple[int, Tokens]]:
        """Yield the token states of `layers`, see `run_blocks`, given the embedded time."""
        parts = [time[:, None], self.patch_embed(x)]
        if self.num_classes:
            if y is None:
                y = self.null_labels(len(x), x.device)
            parts.insert(0, self.label_emb(y)[:, None])
        tokens = torch.cat(parts, dim=1) + self.pos_embed
        skips = len(self.out_blocks) if self.config["skip"] else 0
        return self.run_blocks(tokens, self.blocks(), skips, layers=layers, time=time)

    def embed_time(self, t: Float[Tensor, " b"]) -> Float[Tensor, "b d"]:
        """Return the embedding of the time in the dtype of the weights: float32 unless the network was converted."""
        with without_autocast(t):
            waves = timestep_embedding(self.time_scale * t, self.dim)
            return self.time_embed(waves.to(self.pos_embed.dtype))


def _official_init(net: UViT) -> None:
    """Initialise linear weights and positions with normal(0, 0.02) and biases with 0.

    Convolutions and labels keep torch's default.
    """
    init_linears(net, lambda weight: nn.init.trunc_normal_(weight, std=0.02))
    nn.init.trunc_normal_(net.pos_embed, std=0.02)


def _xavier_init(net: UViT) -> None:
    """Initialise linear weights xavier-uniform, biases with 0, positions with std 0.2 and labels with std 0.5.

    At width 64 the official 0.02 makes the outputs of the skip merges too small; measured in docs/LOG.md.
    """
    init_linears(net, nn.init.xavier_uniform_)
    nn.init.trunc_normal_(net.pos_embed, std=0.2)
    if net.num_classes:
        nn.init.normal_(net.label_emb.weight, std=0.5)


_INITS = {"official": _official_init, "xavier": _xavier_init}
