"""Common parts of the reference networks: layouts, forward passes, random weights, inputs."""

import math
from itertools import repeat

import torch
from torch.nn import functional


def layer(name, *shape, bias=True):
    """Return names and shapes of a linear layer, a convolution or a norm."""
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})


def block_shapes(block, dim, hidden, qkv_bias=True, norms=True):
    """Return names and shapes of a block."""
    shapes = layer(f"{block}.norm1", dim) | layer(f"{block}.norm2", dim) if norms else {}
    shapes |= layer(f"{block}.attn.qkv", 3 * dim, dim, bias=qkv_bias) | layer(f"{block}.attn.proj", dim, dim)
    return shapes | layer(f"{block}.mlp.fc1", hidden, dim) | layer(f"{block}.mlp.fc2", dim, hidden)


def random_values(shapes, seed):
    """Return a random state_dict, scaled so that every part changes the output and no gate is closed."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            state[name] = 0.1 * values + (1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            state[name] = (0.3 if "adaLN" in name else 0.1) * values
        elif name.endswith(("pos_embed", "_token", "label_emb.weight", "y_embedder.embedding_table.weight")):
            state[name] = 0.5 * values
        else:
            state[name] = values / math.sqrt(math.prod(shape[1:]))
    return state


def makers(kind, sizes, shapes):
    """Return functions that make a reference's network, its weights in the published layout, both, and inputs."""

    def small(**options):
        torch.manual_seed(0)
        return kind(**sizes | options)

    def random_state(seed=0, **options):
        return random_values(shapes(**options), seed)

    def loaded(**options):
        net = small(**options)
        net.load_state_dict(random_state(**sizes | options), strict=True)
        return net

    def inputs(count=3, **options):
        """Return random images, a time for each, and a label for each if there are classes."""
        size, generator = sizes | options, torch.Generator().manual_seed(1)
        x = torch.randn(count, size["channels"], size["image_size"], size["image_size"], generator=generator)
        labels = torch.arange(count) % size["num_classes"] if size.get("num_classes") else None
        return x, torch.tensor([0.02, 0.4, 0.997][:count]), labels

    return small, random_state, loaded, inputs


def linear(w, name, h):
    return functional.linear(h, w[name + ".weight"], w.get(name + ".bias"))


def norm(w, name, h, eps):
    return functional.layer_norm(h, h.shape[-1:], w[name + ".weight"], w[name + ".bias"], eps)


def attention(w, name, h, heads):
    """Compute self-attention, one head after the other."""
    q, k, v = linear(w, name + ".qkv", h).chunk(3, dim=-1)
    head, width = [], h.shape[-1] // heads
    for i in range(0, h.shape[-1], width):
        scores = q[..., i : i + width] @ k[..., i : i + width].transpose(1, 2) / math.sqrt(width)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        head.append(weights / weights.sum(-1, keepdim=True) @ v[..., i : i + width])
    return linear(w, name + ".proj", torch.cat(head, -1))


def mlp(w, name, h, gelu="none"):
    return linear(w, name + ".fc2", functional.gelu(linear(w, name + ".fc1", h), approximate=gelu))


def each(scales):
    """Yield one number after the other, or ones without end."""
    return iter(scales or repeat(1.0))


def block(w, name, h, heads, eps, alphas, betas):
    """Compute a transformer block; its branches take the next alphas and betas."""
    h = next(alphas) * h + next(betas) * attention(w, name + ".attn", norm(w, name + ".norm1", h, eps), heads)
    return next(alphas) * h + next(betas) * mlp(w, name + ".mlp", norm(w, name + ".norm2", h, eps))


def embed_patches(w, name, x):
    """Return the patches of images as tokens, row by row."""
    weight = w[name + ".weight"]
    return functional.conv2d(x, weight, w[name + ".bias"], stride=weight.shape[-1]).flatten(2).transpose(1, 2)


def waves(t, half):
    """Return cosines and sines of a time."""
    angles = t[:, None] * torch.exp(-math.log(1e4) * torch.arange(half) / half)
    return torch.cat([angles.cos(), angles.sin()], -1)


def image_of(h, patch_size):
    """Return the image whose patches are these tokens: rows, columns, then channels."""
    count, side = len(h), math.isqrt(h.shape[1])
    h = torch.einsum("nhwpqc->nchpwq", h.reshape(count, side, side, patch_size, patch_size, -1))
    return h.flatten(4).flatten(2, 3)
