"""The official MAE and its decayed variant written again from their layout and function, and small files of each kind.

Images are those that the official code sees: standardised with ImageNet's mean and deviation, see `standardised`.
Masks are given by noise: the patches of the smallest noise are kept.
"""

import math
from argparse import Namespace

import torch
from reference import attention, block_shapes, linear, random_values
from torch.nn import functional

SMALL = dict(
    image_size=8, patch_size=2, channels=3, dim=16, depth=4, heads=2, decoder_dim=24, decoder_depth=3, decoder_heads=3
)
SMALL_VIT = {name: value for name, value in SMALL.items() if not name.startswith("decoder")}
BASE = dict(
    image_size=224, patch_size=16, channels=3, dim=768, depth=12, heads=12, decoder_dim=512, decoder_depth=8,
    decoder_heads=16,
)  # fmt: skip
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


# ---- layouts


def vit_shapes(prefix, depth, dim, mlp_ratio=4.0):
    """Names and shapes of the blocks `prefix`.0, .1, ..."""
    shapes = {}
    for block in (f"{prefix}.{i}" for i in range(depth)):
        shapes |= {f"{block}.{norm}.{kind}": (dim,) for norm in ("norm1", "norm2") for kind in ("weight", "bias")}
        shapes |= block_shapes(block, dim, int(dim * mlp_ratio), qkv_bias=True)
    return shapes


def norm_shapes(name, dim):
    return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}


def encoder_shapes(image_size, patch_size, channels, dim, depth, norm="norm", num_classes=0, mlp_ratio=4.0, **_):
    """Names and shapes of an encoder; `norm` names its last norm (norm, fc_norm) or is None."""
    tokens = (image_size // patch_size) ** 2
    shapes = {
        "cls_token": (1, 1, dim),
        "pos_embed": (1, 1 + tokens, dim),
        "patch_embed.proj.weight": (dim, channels, patch_size, patch_size),
        "patch_embed.proj.bias": (dim,),
    }
    shapes |= vit_shapes("blocks", depth, dim, mlp_ratio)
    shapes |= norm_shapes(norm, dim) if norm else {}
    return shapes | ({"head.weight": (num_classes, dim), "head.bias": (num_classes,)} if num_classes else {})


def mae_shapes(wiring="official", skips=None, **size):
    """Names and shapes of a whole MAE; the authors' has `skips` SkipLayers, by default half as many as blocks."""
    image_size, patch, channels = size["image_size"], size["patch_size"], size["channels"]
    dim, depth, inner = size["dim"], size["depth"], size["decoder_dim"]
    official, values = wiring == "official", patch**2 * channels
    shapes = encoder_shapes(**size, norm="norm" if official else None)
    shapes["decoder_pos_embed"] = (1, 1 + (image_size // patch) ** 2, inner)
    shapes["mask_token" if official else "decoder_cls_token"] = (1, 1, inner)
    shapes |= {"decoder_embed.weight": (inner, dim if official else inner), "decoder_embed.bias": (inner,)}
    shapes |= vit_shapes("decoder_blocks", size["decoder_depth"], inner)
    shapes |= norm_shapes("decoder_norm", inner)
    shapes |= {"decoder_pred.weight": (values, inner), "decoder_pred.bias": (values,)}
    for j in range(0 if official else depth // 2 if skips is None else skips):
        shapes |= {f"skip.{j}.mask_token": (1, 1, dim)}
        shapes |= {f"skip.{j}.fc.0.weight": (inner, dim + inner), f"skip.{j}.fc.0.bias": (inner,)}
        shapes |= {f"skip.{j}.fc.2.weight": (inner, inner), f"skip.{j}.fc.2.bias": (inner,)}
    return shapes


# ---- files, as their torch.load gives them


def random_state(seed=0, **size):
    """A random state_dict of a whole MAE: the file `full`, or `visualize`, without its outer dict."""
    return random_values(mae_shapes(**size), seed)


def encoder_state(seed=0, **size):
    return random_values(encoder_shapes(**size), seed)


def pretrained_file(seed=0, **size):
    """An encoder-only file, as mae_pretrain_vit_base.pth."""
    return {"model": encoder_state(seed, **size)}


def full_file(seed=0, **size):
    """Encoder and decoder, as mae_pretrain_vit_base_full.pth and mae_visualize_vit_base.pth."""
    return {"model": random_state(seed, **size)}


def finetuned_file(num_classes=5, seed=0, **size):
    """A fine-tuned network, as mae_finetuned_vit_base.pth: fc_norm on the mean of the patches, no norm."""
    return {"model": encoder_state(seed, norm="fc_norm", num_classes=num_classes, **size)}


def probed_file(num_classes=5, seed=0, norm="norm", **size):
    """A linear probe as the official script saves it: a batch norm without weights, then a linear layer."""
    state = encoder_state(seed, norm=norm, num_classes=num_classes, **size)
    weight, bias = state.pop("head.weight"), state.pop("head.bias")
    generator = torch.Generator().manual_seed(seed + 1)
    state["head.0.running_mean"] = torch.randn(size["dim"], generator=generator)
    state["head.0.running_var"] = 0.5 + torch.rand(size["dim"], generator=generator)
    state["head.0.num_batches_tracked"] = torch.tensor(7)
    return training_file(state | {"head.1.weight": weight, "head.1.bias": bias}, Namespace(model="vit_base_patch16"))


def decayed_file(seed=0, min_decay=None, **size):
    """A file of the authors' pre-training, checkpoint-00049.pth."""
    args = Namespace(model="mae_vit_base_patch16", mask_ratio=0.75, norm_pix_loss=True, min_decay=min_decay)
    return training_file(random_state(seed, wiring="decayed", **size), args)


def training_file(state, args, epoch=49):
    optimizer = {"state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 1e-4}]}
    return {"model": state, "optimizer": optimizer, "epoch": epoch, "scaler": {"scale": 65536.0}, "args": args}


# ---- function


def standardised(x):
    """What the official code sees of images in [-1, 1] of 3 channels."""
    mean, std = (torch.tensor(values, dtype=x.dtype).view(3, 1, 1) for values in (MEAN, STD))
    return ((x + 1) / 2 - mean) / std


def norm(w, name, h):
    centred = h - h.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[name + ".weight"] + w[name + ".bias"]


def block(w, name, h, heads, alphas=(1.0, 1.0), betas=(1.0, 1.0)):
    h = alphas[0] * h + betas[0] * attention(w, name + ".attn", norm(w, name + ".norm1", h), heads)
    f = linear(w, name + ".mlp.fc1", norm(w, name + ".norm2", h))
    f = linear(w, name + ".mlp.fc2", f * 0.5 * (1 + torch.erf(f / math.sqrt(2))))
    return alphas[1] * h + betas[1] * f


def number(w, prefix):
    """How many modules `prefix`.0, .1, ... there are."""
    return len({name.split(".")[1] for name in w if name.split(".")[0] == prefix})


def kept_patches(noise, mask_ratio):
    """The patches that stay visible, (b, k), in the order of their noise."""
    return noise.argsort(dim=1)[:, : int(noise.shape[1] * (1 - mask_ratio))]


def encoder_states(w, x, heads, kept=None, alphas=None, betas=None):
    """The states after the embeddings and after every block, with the `kept` patches only, or all."""
    patch, depth = w["patch_embed.proj.weight"].shape[-1], number(w, "blocks")
    alphas, betas = alphas or [1.0] * (2 * depth), betas or [1.0] * (2 * depth)
    h = functional.conv2d(x, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=patch)
    h = h.flatten(2).transpose(1, 2) + w["pos_embed"][:, 1:]
    if kept is not None:
        h = torch.stack([h[i, positions] for i, positions in enumerate(kept)])
    h = torch.cat([(w["cls_token"] + w["pos_embed"][:, :1]).expand(len(h), 1, -1), h], 1)
    states = [h]
    for i in range(depth):
        pair = slice(2 * i, 2 * i + 2)
        states.append(block(w, f"blocks.{i}", states[-1], heads, alphas[pair], betas[pair]))
    return states


def spread(h, kept, mask_token, count):
    """All `count` patches behind the class token: those that were kept in their places, mask tokens elsewhere."""
    patches = mask_token.expand(len(h), count, -1).clone()
    for i, positions in enumerate(kept):
        patches[i, positions] = h[i, 1:]
    return torch.cat([h[:, :1], patches], 1)


def decoder_input(w, states, kept):
    """The first state of the decoder, which in the authors' variant does not depend on the images."""
    if "mask_token" in w:
        latent = norm(w, "norm", states[-1]) if "norm.weight" in w else states[-1]
        count = w["decoder_pos_embed"].shape[1] - 1
        return spread(linear(w, "decoder_embed", latent), kept, w["mask_token"], count) + w["decoder_pos_embed"]
    y = torch.cat([w["decoder_cls_token"], w["decoder_pos_embed"][:, 1:]], 1)
    return linear(w, "decoder_embed", y).expand(len(kept), -1, -1)


def mae_forward(w, x, noise, mask_ratio=0.75, *, heads, decoder_heads, alphas=None, betas=None, **_):
    """Prediction (b, n, p*p*c) and mask (b, n), which is 1 where a patch was removed."""
    kept = kept_patches(noise, mask_ratio)
    states = encoder_states(w, x, heads, kept, alphas, betas)
    y, last = decoder_input(w, states, kept), len(states) - 1
    for i in range(number(w, "decoder_blocks")):
        if f"skip.{i}.fc.0.weight" in w:  # decoder block i reads encoder block depth - 1 - 2i, counted from 0
            s = spread(states[last - 2 * i], kept, w[f"skip.{i}.mask_token"], noise.shape[1])
            f = functional.silu(linear(w, f"skip.{i}.fc.0", torch.cat([s, y], -1)))
            y = y + linear(w, f"skip.{i}.fc.2", f)
        y = block(w, f"decoder_blocks.{i}", y, decoder_heads)
    mask = torch.ones_like(noise)
    for i, positions in enumerate(kept):
        mask[i, positions] = 0
    return linear(w, "decoder_pred", norm(w, "decoder_norm", y))[:, 1:], mask


def targets(x, patch_size, norm_pix=True):
    """What is predicted of each patch, (b, n, p*p*c): rows, columns, then channels; patches row by row."""
    side = x.shape[-1] // patch_size
    corners = [(row * patch_size, column * patch_size) for row in range(side) for column in range(side)]
    patches = [x[:, :, down : down + patch_size, across : across + patch_size] for down, across in corners]
    values = torch.stack([patch.permute(0, 2, 3, 1).flatten(1) for patch in patches], 1)
    if not norm_pix:
        return values
    centred = values - values.mean(-1, keepdim=True)
    variance = centred.square().sum(-1, keepdim=True) / (values.shape[-1] - 1)
    return centred / (variance + 1e-6).sqrt()


def loss(x, prediction, mask, patch_size, norm_pix=True):
    """The mean squared error of the removed patches."""
    errors = (prediction - targets(x, patch_size, norm_pix)).square().mean(-1)
    return errors[mask == 1].mean()


def pooled(w, x, heads, alphas=None, betas=None):
    """The input of the head: the mean of the patches, normed, or the class token of the normed state."""
    h = encoder_states(w, x, heads, None, alphas, betas)[-1]
    if "fc_norm.weight" in w:
        return norm(w, "fc_norm", h[:, 1:].mean(1))
    return (norm(w, "norm", h) if "norm.weight" in w else h)[:, 0]


def logits(w, x, heads, alphas=None, betas=None):
    """The output of a fine-tuned network, or of a linear probe in evaluation."""
    features = pooled(w, x, heads, alphas, betas)
    if "head.weight" in w:
        return linear(w, "head", features)
    features = (features - w["head.0.running_mean"]) / (w["head.0.running_var"] + 1e-6).sqrt()
    return linear(w, "head.1", features)


def inputs(image_size=8, channels=3, patch_size=2, count=3, seed=1, **_):
    """Images of noise and the noise of their patches."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, channels, image_size, image_size, generator=generator) * 2 - 1
    return x, torch.rand(count, (image_size // patch_size) ** 2, generator=generator)
