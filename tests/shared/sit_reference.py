"""The published SiT and its decayed variant written again from their layout and function, and small networks."""

import torch
from reference import attention, block_shapes, each, embed_patches, image_of, layer, linear, makers, mlp, waves
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


def official_shapes(image_size, patch_size, channels, dim, depth, num_classes, mlp_ratio=4.0, **options):
    """Return names and shapes of a published SiT file."""
    shapes = {"pos_embed": (1, (image_size // patch_size) ** 2, dim)}
    shapes |= layer("x_embedder.proj", dim, channels, patch_size, patch_size)
    shapes |= layer("t_embedder.mlp.0", dim, 256) | layer("t_embedder.mlp.2", dim, dim)
    shapes |= layer("final_layer.linear", patch_size**2 * channels * (1 + options.get("learn_sigma", False)), dim)
    shapes |= layer("final_layer.adaLN_modulation.1", 2 * dim, dim)
    if num_classes:
        shapes["y_embedder.embedding_table.weight"] = (num_classes + options.get("null_label", True), dim)
    blocks = [f"blocks.{i}" for i in range(depth)]
    if options.get("wiring") == "decayed":
        blocks = [f"{side}_blocks.{i}" for side in ("enc", "dec") for i in range(depth // 2)]
    for name in blocks:
        shapes |= block_shapes(name, dim, int(dim * mlp_ratio), norms=False)
        shapes |= layer(f"{name}.adaLN_modulation.1", 6 * dim, dim)
        if name.startswith("dec"):
            shapes |= layer(f"{name}.skip", dim, 2 * dim if options.get("skip") == "concat" else dim)
    return shapes


small, random_state, loaded, inputs = makers(SiT, SMALL, official_shapes)


def modulate(h, shift, scale):
    h = functional.layer_norm(h, h.shape[-1:], eps=1e-6)
    return h * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def forward_intermediates(w, h, c, *, depth, heads, alphas=None, betas=None):
    """Compute the blocks between embeddings and head, with the wiring of the names in `w`."""
    alphas, betas = each(alphas), each(betas)

    def block(name, h):
        modulation = linear(w, name + ".adaLN_modulation.1", functional.silu(c))
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation.chunk(6, dim=1)
        f = gate_msa.unsqueeze(1) * attention(w, name + ".attn", modulate(h, shift_msa, scale_msa), heads)
        h = next(alphas) * h + next(betas) * f
        f = gate_mlp.unsqueeze(1) * mlp(w, name + ".mlp", modulate(h, shift_mlp, scale_mlp), "tanh")
        return next(alphas) * h + next(betas) * f

    if "blocks.0.attn.qkv.weight" in w:
        for i in range(depth):
            h = block(f"blocks.{i}", h)
        return h
    memory = []
    for i in range(depth // 2):
        h = block(f"enc_blocks.{i}", h)
        memory.append(h)
    for i in range(depth // 2):
        name, read = f"dec_blocks.{i}", memory.pop()
        if w[name + ".skip.weight"].shape[1] == h.shape[-1]:
            h = h + linear(w, name + ".skip", read)
        else:
            h = linear(w, name + ".skip", torch.cat([h, read], -1))
        h = block(name, h)
    return h


def official_forward(w, x, official_time, y=None, *, depth, heads, patch_size, alphas=None, betas=None, **_):
    """Compute the published forward pass on a state_dict `w`; official time is 1 at the data, 0 at the noise."""
    h = embed_patches(w, "x_embedder.proj", x) + w["pos_embed"]
    c = linear(w, "t_embedder.mlp.2", functional.silu(linear(w, "t_embedder.mlp.0", waves(official_time, 128))))
    if y is not None:
        c = c + w["y_embedder.embedding_table.weight"][y]
    h = forward_intermediates(w, h, c, depth=depth, heads=heads, alphas=alphas, betas=betas)
    shift, scale = linear(w, "final_layer.adaLN_modulation.1", functional.silu(c)).chunk(2, dim=1)
    return image_of(linear(w, "final_layer.linear", modulate(h, shift, scale)), patch_size)[:, : x.shape[1]]
