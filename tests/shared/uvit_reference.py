"""The official U-ViT written again from its published layout and function, and small networks to compare with it."""

import math

import torch
from reference import attention, block_shapes, linear, random_inputs, random_values
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


def small(**options):
    torch.manual_seed(0)
    return UViT(**SMALL | options)


def official_shapes(
    image_size,
    patch_size,
    channels,
    dim,
    depth,
    num_classes=0,
    null_label=True,
    conv=True,
    skip=True,
    mlp_time_embed=False,
    qkv_bias=False,
    mlp_ratio=4.0,
    **_,
):
    """Names and shapes of an official U-ViT file, written down from its published layout."""
    values, tokens, hidden = patch_size**2 * channels, (image_size // patch_size) ** 2, int(dim * mlp_ratio)
    shapes = {
        "pos_embed": (1, tokens + (2 if num_classes else 1), dim),
        "patch_embed.proj.weight": (dim, channels, patch_size, patch_size),
        "patch_embed.proj.bias": (dim,),
        "norm.weight": (dim,),
        "norm.bias": (dim,),
        "decoder_pred.weight": (values, dim),
        "decoder_pred.bias": (values,),
    }
    if mlp_time_embed:
        shapes |= {"time_embed.0.weight": (4 * dim, dim), "time_embed.0.bias": (4 * dim,)}
        shapes |= {"time_embed.2.weight": (dim, 4 * dim), "time_embed.2.bias": (dim,)}
    if num_classes:
        shapes["label_emb.weight"] = (num_classes + 1 if null_label else num_classes, dim)
    if conv:
        shapes |= {"final_layer.weight": (channels, channels, 3, 3), "final_layer.bias": (channels,)}
    sides = [f"{side}_blocks.{i}" for side in ("in", "out") for i in range(depth // 2)]
    for block in [*sides, "mid_block"]:
        shapes |= {f"{block}.{norm}.{kind}": (dim,) for norm in ("norm1", "norm2") for kind in ("weight", "bias")}
        shapes |= block_shapes(block, dim, hidden, qkv_bias)
        if skip and block.startswith("out"):
            shapes |= {f"{block}.skip_linear.weight": (dim, 2 * dim), f"{block}.skip_linear.bias": (dim,)}
    return shapes


def random_state(seed=0, **options):
    """A random state_dict in the official layout."""
    return random_values(official_shapes(**options), seed)


def norm(w, name, h):
    centred = h - h.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[name + ".weight"] + w[name + ".bias"]


def official_trunk(w, h, *, depth, heads, alphas=None, betas=None):
    """The blocks between the embeddings and the last norm, with one alpha and beta a branch."""
    alphas = iter(alphas or [1.0] * (2 * depth + 2))
    betas = iter(betas or [1.0] * (2 * depth + 2))

    def mlp(name, h):
        h = linear(w, name + ".fc1", h)
        return linear(w, name + ".fc2", h * 0.5 * (1 + torch.erf(h / math.sqrt(2))))

    def block(name, h, skip=None):
        if name + ".skip_linear.weight" in w:
            h = linear(w, name + ".skip_linear", torch.cat([h, skip], -1))
        h = next(alphas) * h + next(betas) * attention(w, name + ".attn", norm(w, name + ".norm1", h), heads)
        return next(alphas) * h + next(betas) * mlp(name + ".mlp", norm(w, name + ".norm2", h))

    memory = []
    for i in range(depth // 2):
        h = block(f"in_blocks.{i}", h)
        memory.append(h)
    h = block("mid_block", h)
    for i in range(depth // 2):
        h = block(f"out_blocks.{i}", h, memory.pop())
    return h


def official_forward(w, x, t, y=None, *, dim, depth, heads, patch_size, time_scale=999.0, alphas=None, betas=None, **_):
    """The published forward pass, one step after the other on a state_dict `w`, with one alpha and beta a branch."""
    count, channels, size, _ = x.shape
    patches = functional.conv2d(x, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=patch_size)
    h = patches.flatten(2).transpose(1, 2)
    half = dim // 2
    angles = (time_scale * t)[:, None] * torch.exp(-math.log(1e4) * torch.arange(half) / half)
    time = torch.cat([angles.cos(), angles.sin()], -1)
    if "time_embed.0.weight" in w:
        time = linear(w, "time_embed.0", time)
        time = linear(w, "time_embed.2", time / (1 + torch.exp(-time)))
    extra = [time] if y is None else [w["label_emb.weight"][y], time]
    h = torch.cat([torch.stack(extra, 1), h], 1) + w["pos_embed"]
    h = official_trunk(w, h, depth=depth, heads=heads, alphas=alphas, betas=betas)
    h = linear(w, "decoder_pred", norm(w, "norm", h))[:, len(extra) :]

    image = torch.empty(count, channels, size, size)
    side = size // patch_size
    for row in range(side):
        for column in range(side):
            values = h[:, row * side + column].reshape(count, patch_size, patch_size, channels)
            down, across = row * patch_size, column * patch_size
            image[:, :, down : down + patch_size, across : across + patch_size] = values.permute(0, 3, 1, 2)
    if "final_layer.weight" in w:
        image = functional.conv2d(image, w["final_layer.weight"], w["final_layer.bias"], padding=1)
    return image


def inputs(image_size=8, channels=3, num_classes=0, count=3, **_):
    return random_inputs(image_size, channels, num_classes, [0.02, 0.5, 0.997][:count])


def loaded(**options):
    """A small network with random weights of the official layout, in which no branch is silent."""
    net = small(**options)
    net.load_state_dict(random_state(**SMALL | options), strict=True)
    return net
