"""The published SiT and its decayed variant written again from their layout and function, and small networks."""

import math

import torch
from reference import attention, block_shapes, linear, random_inputs, random_values
from torch.nn import functional

from uvit_decay.nn import SiT

SMALL = dict(image_size=8, patch_size=2, channels=4, dim=16, depth=4, heads=2, num_classes=3)
VARIANTS = {
    "official": dict(),
    "decayed": dict(wiring="decayed"),
    "concat": dict(wiring="decayed", skip="concat"),
    "official-sigma": dict(learn_sigma=True),
    "decayed-sigma": dict(wiring="decayed", learn_sigma=True),
    "labels-without-null": dict(null_label=False),
    "unconditional": dict(num_classes=0),
    "patch-4": dict(patch_size=4, channels=1, image_size=16),
    "narrow-mlp": dict(mlp_ratio=2.0),
    "odd-depth": dict(depth=3),
}


def small(**options):
    torch.manual_seed(0)
    return SiT(**SMALL | options)


def official_shapes(
    image_size,
    patch_size,
    channels,
    dim,
    depth,
    num_classes,
    null_label=True,
    wiring="official",
    skip="add",
    learn_sigma=False,
    mlp_ratio=4.0,
    **_,
):
    """Names and shapes of a published SiT file, written down from its layout."""
    values, tokens, hidden = patch_size**2 * channels, (image_size // patch_size) ** 2, int(dim * mlp_ratio)
    shapes = {
        "pos_embed": (1, tokens, dim),
        "x_embedder.proj.weight": (dim, channels, patch_size, patch_size),
        "x_embedder.proj.bias": (dim,),
        "t_embedder.mlp.0.weight": (dim, 256),
        "t_embedder.mlp.0.bias": (dim,),
        "t_embedder.mlp.2.weight": (dim, dim),
        "t_embedder.mlp.2.bias": (dim,),
        "final_layer.linear.weight": (2 * values if learn_sigma else values, dim),
        "final_layer.linear.bias": (2 * values if learn_sigma else values,),
        "final_layer.adaLN_modulation.1.weight": (2 * dim, dim),
        "final_layer.adaLN_modulation.1.bias": (2 * dim,),
    }
    if num_classes:
        shapes["y_embedder.embedding_table.weight"] = (num_classes + 1 if null_label else num_classes, dim)
    blocks = [f"blocks.{i}" for i in range(depth)]
    if wiring == "decayed":
        blocks = [f"{side}_blocks.{i}" for side in ("enc", "dec") for i in range(depth // 2)]
    for block in blocks:
        shapes |= block_shapes(block, dim, hidden, qkv_bias=True)
        shapes |= {f"{block}.adaLN_modulation.1.weight": (6 * dim, dim)}
        shapes |= {f"{block}.adaLN_modulation.1.bias": (6 * dim,)}
        if block.startswith("dec"):
            shapes |= {f"{block}.skip.weight": (dim, dim if skip == "add" else 2 * dim), f"{block}.skip.bias": (dim,)}
    return shapes


def random_state(seed=0, **options):
    """A random state_dict in the published layout."""
    return random_values(official_shapes(**options), seed)


def modulated(h, shift, scale):
    h = functional.layer_norm(h, h.shape[-1:], eps=1e-6)
    return h * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def mlp(w, name, h):
    h = linear(w, name + ".fc1", h)
    h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return linear(w, name + ".fc2", h)


def forward_intermediates(w, h, c, *, depth, heads, alphas=None, betas=None):
    """The blocks between the embeddings and the head, of the wiring whose names `w` has."""
    alphas, betas = iter(alphas or [1.0] * (2 * depth)), iter(betas or [1.0] * (2 * depth))

    def block(name, h):
        modulation = linear(w, name + ".adaLN_modulation.1", functional.silu(c))
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation.chunk(6, dim=1)
        f = gate_msa.unsqueeze(1) * attention(w, name + ".attn", modulated(h, shift_msa, scale_msa), heads)
        h = next(alphas) * h + next(betas) * f
        f = gate_mlp.unsqueeze(1) * mlp(w, name + ".mlp", modulated(h, shift_mlp, scale_mlp))
        return next(alphas) * h + next(betas) * f

    if "blocks.0.attn.qkv.weight" in w:
        for i in range(depth):
            h = block(f"blocks.{i}", h)
        return h
    memory = []
    for i in range(depth // 2):
        h = block(f"enc_blocks.{i}", h)
        memory.append(h)
    for j in range(depth // 2):
        name, read = f"dec_blocks.{j}", memory[depth // 2 - 1 - j]
        if w[name + ".skip.weight"].shape[1] == h.shape[-1]:
            h = h + linear(w, name + ".skip", read)
        else:
            h = linear(w, name + ".skip", torch.cat([h, read], -1))
        h = block(name, h)
    return h


def official_forward(
    w, x, official_time, y=None, *, depth, heads, patch_size, learn_sigma=False, alphas=None, betas=None, **_
):
    """The published forward pass on a state_dict `w`; official time is 1 at the data, 0 at the noise."""
    count, channels, size, _ = x.shape
    patches = functional.conv2d(x, w["x_embedder.proj.weight"], w["x_embedder.proj.bias"], stride=patch_size)
    h = patches.flatten(2).transpose(1, 2) + w["pos_embed"]
    angles = official_time[:, None] * torch.exp(-math.log(1e4) * torch.arange(128) / 128)
    c = linear(w, "t_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()], -1))
    c = linear(w, "t_embedder.mlp.2", functional.silu(c))
    if y is not None:
        c = c + w["y_embedder.embedding_table.weight"][y]
    h = forward_intermediates(w, h, c, depth=depth, heads=heads, alphas=alphas, betas=betas)
    shift, scale = linear(w, "final_layer.adaLN_modulation.1", functional.silu(c)).chunk(2, dim=1)
    h = linear(w, "final_layer.linear", modulated(h, shift, scale))

    side, out = size // patch_size, 2 * channels if learn_sigma else channels
    h = torch.einsum("nhwpqc->nchpwq", h.reshape(count, side, side, patch_size, patch_size, out))
    return h.reshape(count, out, size, size)[:, :channels]


def inputs(image_size=8, channels=4, num_classes=3, count=3, **_):
    return random_inputs(image_size, channels, num_classes, [0.02, 0.4, 0.997][:count])


def loaded(**options):
    """A small network with random weights of the published layout, in which no branch is silent."""
    net = small(**options)
    net.load_state_dict(random_state(**SMALL | options), strict=True)
    return net
