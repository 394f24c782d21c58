"""What the references of the networks have in common: layout and function of attention, random weights, inputs."""

import math

import torch
from torch.nn import functional


def block_shapes(block, dim, hidden, qkv_bias):
    """Names and shapes of the attention and the MLP of a block."""
    shapes = {f"{block}.attn.qkv.weight": (3 * dim, dim)}
    if qkv_bias:
        shapes[f"{block}.attn.qkv.bias"] = (3 * dim,)
    shapes |= {f"{block}.attn.proj.weight": (dim, dim), f"{block}.attn.proj.bias": (dim,)}
    shapes |= {f"{block}.mlp.fc1.weight": (hidden, dim), f"{block}.mlp.fc1.bias": (hidden,)}
    return shapes | {f"{block}.mlp.fc2.weight": (dim, hidden), f"{block}.mlp.fc2.bias": (dim,)}


def random_values(shapes, seed):
    """A random state_dict, scaled so that every part matters in the output and no gate is shut."""
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


def random_inputs(image_size, channels, num_classes, times):
    """Images of noise, a time for each, and a label for each if there are classes."""
    generator, count = torch.Generator().manual_seed(1), len(times)
    x = torch.randn(count, channels, image_size, image_size, generator=generator)
    return x, torch.tensor(times), torch.arange(count) % num_classes if num_classes else None


def linear(w, name, h):
    return functional.linear(h, w[name + ".weight"], w.get(name + ".bias"))


def attention(w, name, h, heads):
    """Self-attention, one head after the other."""
    q, k, v = linear(w, name + ".qkv", h).chunk(3, dim=-1)
    head, width = [], h.shape[-1] // heads
    for i in range(0, h.shape[-1], width):
        scores = q[..., i : i + width] @ k[..., i : i + width].transpose(1, 2) / math.sqrt(width)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        head.append(weights / weights.sum(-1, keepdim=True) @ v[..., i : i + width])
    return linear(w, name + ".proj", torch.cat(head, -1))
