"""SiT (Ma et al., ECCV 2024; the network of DiT) with decayed identity shortcuts, plain or as an encoder and a decoder.

Wiring `official` is the published network: `depth` blocks in a row. Wiring `decayed` is from the decay's authors:
depth/2 encoder and depth/2 decoder blocks, each decoder block reading the encoder block of its height (last in, first
out). There is no middle block, so the skip of the first decoder block equals its input. alpha runs over the 2 depth
residual branches in execution order, through the end of the decoder. Names, shapes and initialisation are as in the
published codes: their state_dicts load with strict=True, and alpha_min = 1 is the official function.

Time is in [0, 1] with t = 0 data and t = 1 noise. SiT's time is 1 - t. This module embeds 1 - t, unscaled, or with time
`dit` the number of DiT's noise level; no other module converts the time. The output equals the published function's,
unchanged: a published SiT, trained on velocities, returns dx/d(1 - t) = -dx/dt. Targets and their signs are chosen by
the code that trains or samples the network.

b = batch, n = tokens, d = width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from uvit_decay import decay
from uvit_decay.nn.arguments import Wiring, check_sizes, collect_arguments
from uvit_decay.nn.base import DataLayers, DecayedNet
from uvit_decay.nn.block import AdaLNBlock, AdaLNHead, SkipMerge, Tokens, init_linears
from uvit_decay.nn.embed import LabelEmbedder, PatchEmbed, TimestepEmbedder, sincos_positions, unpatchify
from uvit_decay.nn.inputs import check_images, check_times
from uvit_decay.nn.intermediates import block_layers
from uvit_decay.nn.layers import LayerFactory, MlpType, NormType
from uvit_decay.nn.long_skips import SkipScale, plan_mirrored_skips
from uvit_decay.nn.output_skip import OutputSkipKind, build_output_skip
from uvit_decay.runtime.constants import LEVEL_ROUNDING, LEVELS
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import check_types

Time = Literal["sit", "dit"]


@check_types
class SiT(DecayedNet, pipeline_tag="unconditional-image-generation"):
    """SiT denoiser net(x, t, y) -> (b, c, h, w): images of about [-1, 1], times (b,) in [0, 1], labels (b,) int64.

    Args:
        image_size: height and width in pixels, or in latent cells. Null in a configuration means as the
            data, also for channels and num_classes.
        patch_size: side of a patch.
        channels: 3 for RGB, 1 for grey, 4 for the latents of a Stable Diffusion autoencoder.
        dim: width d of the tokens, a multiple of 4.
        depth: number of blocks; even for the `decayed` wiring.
        heads: attention heads.
        mlp_ratio: hidden width of the MLPs over d.
        num_classes: K real classes; 0 for an unconditional network.
        null_label: add a row K to the label table that means "no label" (guidance needs it).
        alpha_min: weight of the deepest identity shortcut, in (0, 1]; 1 is the ordinary SiT.
        schedule: how alpha falls with depth, see `uvit_decay.decay.shortcuts`.
        granularity: one alpha for each residual branch, or one for both branches of a block.
        index: how depth is counted; `code` runs from exactly 1 to exactly alpha_min.
        branches: decay both kinds of residual branches, or only one.
        wiring: `official`, blocks in a row; `decayed`, encoder and decoder blocks with long skips.
        skip: how a decoder block merges its skip s: `add` x + W s + b (the authors'), or `concat` W [x, s] + b.
        skip_zero_init: initialise the skips without effect (the authors do not).
        learn_sigma: double the channels of the head and use only the first half, as published files do.
        checkpointing: recompute blocks in the backward pass of training: less memory, more time; not reentrant.
        qk_norm: norm queries and keys, each head over its channels, with learnable scales (ViT-22B, SD3, timm).
        norm_type: kind of all norms, also of queries and keys: `layer` (official) or `rms`, RMSNorm.
        time: time to embed: `sit`, 1 - t, or `dit`, 1000 t - 1: DiT's levels 0 .. 999 at t = .001 .. 1.
        learned_variance: return also the second half of the channels, (b, 2c, h, w): DiT's variance, for the sampler
            dit-ddpm; needs learn_sigma. No loss here trains it.
        skip_scale: factor of the long skips: a number, `kappa:0.7`, `learned`, `learned-each`, `stream` or
            `stream:0.8`, see `uvit_decay.nn.long_skips`; 1 is the published network.
        output_skip: `none`, or `learned`: return a(t) x + b(t) times the prediction, with learned a and b that start at
            0 and 1, see `uvit_decay.nn.output_skip`.
        mlp: kind of the MLPs: `gelu` (official) or `swiglu`, gated, with two thirds of the hidden width (LightningDiT).
    """

    data_layers = DataLayers(
        pixels=("x_embedder", "final_layer.linear"),
        positions=("pos_embed",),
        labels="y_embedder.embedding_table.weight",
        label_bias="t_embedder.mlp.2.bias",
    )

    def __init__(
        self,
        image_size: int | None = 32,
        patch_size: int = 2,
        channels: int | None = 4,
        dim: int = 384,
        depth: int = 12,
        heads: int = 6,
        mlp_ratio: float = 4.0,
        num_classes: int | None = 0,
        null_label: bool = True,
        alpha_min: float = 1.0,
        schedule: decay.Schedule = "linear",
        granularity: decay.Granularity = "branch",
        index: decay.Index = "code",
        branches: decay.Branches = "both",
        wiring: Wiring = "official",
        skip: SkipMerge = "add",
        skip_zero_init: bool = False,
        learn_sigma: bool = False,
        checkpointing: bool = False,
        qk_norm: bool = False,
        norm_type: NormType = "layer",
        time: Time = "sit",
        learned_variance: bool = False,
        skip_scale: SkipScale = 1.0,
        output_skip: OutputSkipKind = "none",
        mlp: MlpType = "gelu",
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] = collect_arguments(locals())
        check_sizes(self.config)
        if wiring == "decayed" and depth % 2:
            raise UserError(f"`depth` must be even, because encoder and decoder blocks come in pairs, got {depth}")
        if wiring == "official" and (skip != "add" or skip_zero_init):
            raise UserError("skip and skip_zero_init are for the decayed wiring's long skips; set `wiring` to decayed")
        if learned_variance and not learn_sigma:
            raise UserError("learned_variance is the second half of a doubled head; set `learn_sigma` to true")
        self.image_size = image_size
        self.channels = channels
        self.num_classes = num_classes
        self.null_label = null_label and num_classes > 0
        self.num_prefix_tokens = 0
        self.dim = dim
        self.checkpointing = checkpointing
        self.learned_variance = learned_variance
        self.x_embedder = PatchEmbed(image_size, patch_size, channels, dim)
        self.t_embedder = TimestepEmbedder(dim)
        if num_classes:
            self.y_embedder = LabelEmbedder(num_classes + self.null_label, dim)
        # Fixed, but a parameter, because published state_dicts contain it and their EMA includes it.
        self.pos_embed = nn.Parameter(sincos_positions(image_size // patch_size, dim)[None], requires_grad=False)
        factory = LayerFactory.of(self.config)
        block = partial(AdaLNBlock, dim, heads, factory)
        if wiring == "official":
            self.blocks = nn.ModuleList([block() for _ in range(depth)])
        else:
            self.enc_blocks = nn.ModuleList([block() for _ in range(depth // 2)])
            self.dec_blocks = nn.ModuleList([block(skip=skip) for _ in range(depth // 2)])
        values = patch_size**2 * channels
        self.final_layer = AdaLNHead(dim, 2 * values if learn_sigma else values, factory)

        self.record_shortcuts(decay.shortcuts(depth, alpha_min, schedule, granularity, index, branches))
        self.layers = block_layers(self.find_decayed_blocks(), denoiser=True)
        self._init_weights()
        self.connect(has_time=True)
        tokens = self.x_embedder.tokens
        self.record_long_skips(plan_mirrored_skips(depth, self._skips(), tokens, boundary=skip == "concat"))
        self.output_skip = build_output_skip(self.config, dim)

    def _init_weights(self) -> None:
        """Initialise as published: xavier-uniform maps, embeddings of std 0.02, branches and output of 0."""
        init_linears(self, nn.init.xavier_uniform_)
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.detach().flatten(1))  # a view: one linear map of a patch
        nn.init.zeros_(self.x_embedder.proj.bias)
        for linear in (self.t_embedder.mlp[0], self.t_embedder.mlp[2]):
            nn.init.normal_(linear.weight, std=0.02)
        if self.num_classes:
            nn.init.normal_(self.y_embedder.embedding_table.weight, std=0.02)
        self.silence(self._blocks())
        if self.config["skip_zero_init"]:  # W = 0 for `add`, W = [I, 0] for `concat`
            init_skip = nn.init.eye_ if self.config["skip"] == "concat" else nn.init.zeros_
            for block in self.dec_blocks:
                init_skip(block.skip.weight)
        self.final_layer.zero_init()

    def _blocks(self) -> list[AdaLNBlock]:
        """Return all blocks in execution order; `blocks` without underscore is a name of the official layout."""
        if self.config["wiring"] == "official":
            return [*self.blocks]
        return [*self.enc_blocks, *self.dec_blocks]

    def _skips(self) -> int:
        """Return the number of long skips."""
        return self.config["depth"] // 2 if self.config["wiring"] == "decayed" else 0

    def forward(
        self,
        x: Float[Tensor, "b c h w"],
        t: Float[Tensor, " b"],
        y: Int[Tensor, " b"] | None = None,
        layers: tuple[int, ...] = (),
    ) -> Float[Tensor, "b k h w"] | tuple[Float[Tensor, "b k h w"], tuple[Tokens, ...]]:
        """Return the prediction; with `layers` also the token states of these layers, see `HasIntermediates`.

        Raises:
            UserError: images of another shape, or at the first call times outside of [0, 1].
        """
        check_images(self, x)
        check_times(self, t)
        time = self.embed_time(t)
        c = self._condition(time, y)
        states = dict(self._states(x, c, time, layers))
        tokens = states[len(self.layers) - 1]
        channels = 2 * self.channels if self.config["learn_sigma"] else self.channels
        output = unpatchify(self.final_layer(tokens, c), channels)
        if not self.learned_variance:
            output = output[:, : self.channels]
        if self.output_skip is not None:
            output = self.output_skip(x, output, time)
        return (output, tuple(states[layer] for layer in layers)) if layers else output

    def forward_intermediates(
        self, x: Float[Tensor, "b c h w"], t: Float[Tensor, " b"], y: Int[Tensor, " b"] | None = None
    ) -> Iterator[Tokens]:
        """Yield the token states after the embeddings and after every block (`layers`); y = None is the null label."""
        check_images(self, x)
        check_times(self, t)
        time = self.embed_time(t)
        return (tokens for _, tokens in self._states(x, self._condition(time, y), time))

    def embed_time(self, t: Float[Tensor, " b"]) -> Float[Tensor, "b d"]:
        """Return the embedding of SiT's time 1 - t, or of DiT's LEVELS t - 1."""
        if self.config["time"] == "sit":
            return self.t_embedder(1.0 - t)
        level = LEVELS * t.float() - 1
        nearest = level.round()  # the time of a level, up to rounding, is embedded as exactly its number
        return self.t_embedder(torch.where((level - nearest).abs() < LEVEL_ROUNDING, nearest, level))

    def _condition(self, time: Float[Tensor, "b d"], y: Tensor | None) -> Float[Tensor, "b d"]:
        """Return the condition c of all blocks: the embedded time plus the embedding of the label."""
        if not self.num_classes:
            return time
        if y is None:
            y = self.null_labels(len(time), time.device)
        return time + self.y_embedder(y)

    def _states(
        self, x: Tensor, c: Tensor, time: Tensor, layers: Collection[int] | None = None
    ) -> Iterator[tuple[int, Tokens]]:
        """Yield the token states of `layers`, see `run_blocks`, given the condition c and the embedded time (b, d)."""
        patches = self.x_embedder(x).contiguous()  # because blocks are also compiled for the strides of their input
        tokens = patches + self.pos_embed
        return self.run_blocks(tokens, self._blocks(), self._skips(), c, layers=layers, time=time)
