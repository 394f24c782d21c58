"""The official U-ViT reimplemented from its published layout and forward pass, and small networks to compare with."""

import torch
from reference import block, block_shapes, each, embed_patches, image_of, layer, linear, makers, norm, waves
from torch.nn import functional

from uvit_decay.nn import UViT

SMALL = dict(image_size=8, patch_size=2, channels=3, dim=16, depth=4, heads=2)
VARIANTS = {
    "unconditional": dict(),
    "labels": dict(num_classes=3),
    "labels-without-null": dict(num_classes=3, null_label=False),
    "patch-4": dict(patch_size=4, channels=1),
    "time-mlp": dict(mlp_time_embed=True),
    "qkv-bias": dict(qkv_bias=True),
    "no-conv": dict(conv=False),
    "no-skip": dict(skip=False),
    "narrow-mlp": dict(mlp_ratio=2.0),
    "time-1000": dict(time_scale=1000.0),
}


def official_shapes(image_size, patch_size, channels, dim, depth, num_classes=0, mlp_ratio=4.0, **options):
    """Return names and shapes of an official U-ViT file."""
    tokens = (image_size // patch_size) ** 2 + (2 if num_classes else 1)
    shapes = {"pos_embed": (1, tokens, dim), **layer("patch_embed.proj", dim, channels, patch_size, patch_size)}
    shapes |= layer("norm", dim) | layer("decoder_pred", patch_size**2 * channels, dim)
    if options.get("mlp_time_embed"):
        shapes |= layer("time_embed.0", 4 * dim, dim) | layer("time_embed.2", dim, 4 * dim)
    if num_classes:
        shapes["label_emb.weight"] = (num_classes + options.get("null_label", True), dim)
    if options.get("conv", True):
        shapes |= layer("final_layer", channels, channels, 3, 3)
    for name in [*(f"{side}_blocks.{i}" for side in ("in", "out") for i in range(depth // 2)), "mid_block"]:
        shapes |= block_shapes(name, dim, int(dim * mlp_ratio), options.get("qkv_bias", False))
        if options.get("skip", True) and name.startswith("out"):
            shapes |= layer(f"{name}.skip_linear", dim, 2 * dim)
    return shapes


small, random_state, loaded, inputs = makers(UViT, SMALL, official_shapes)


def official_trunk(w, h, *, depth, heads, alphas=None, betas=None):
    """Compute the blocks between the embeddings and the last norm, with one alpha and beta per branch."""
    memory, options = [], {"heads": heads, "eps": 1e-5, "alphas": each(alphas), "betas": each(betas)}
    for i in range(depth // 2):
        h = block(w, f"in_blocks.{i}", h, **options)
        memory.append(h)
    h = block(w, "mid_block", h, **options)
    for i in range(depth // 2):
        read = memory.pop()
        if f"out_blocks.{i}.skip_linear.weight" in w:
            h = linear(w, f"out_blocks.{i}.skip_linear", torch.cat([h, read], -1))
        h = block(w, f"out_blocks.{i}", h, **options)
    return h


def official_forward(w, x, t, y=None, *, dim, depth, heads, patch_size, time_scale=999.0, alphas=None, betas=None, **_):
    """Compute the published forward pass on a state_dict `w`, with one alpha and beta per branch."""
    time = waves(time_scale * t, dim // 2)
    if "time_embed.0.weight" in w:
        time = linear(w, "time_embed.2", functional.silu(linear(w, "time_embed.0", time)))
    extra = [time] if y is None else [w["label_emb.weight"][y], time]
    h = torch.cat([torch.stack(extra, 1), embed_patches(w, "patch_embed.proj", x)], 1) + w["pos_embed"]
    h = official_trunk(w, h, depth=depth, heads=heads, alphas=alphas, betas=betas)
    image = image_of(linear(w, "decoder_pred", norm(w, "norm", h, 1e-5))[:, len(extra) :], patch_size)
    if "final_layer.weight" in w:
        image = functional.conv2d(image, w["final_layer.weight"], w["final_layer.bias"], padding=1)
    return image
