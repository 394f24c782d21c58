"""The official MAE and its decayed variant written again from their layout and function, and small files of each kind.

Images are those that the official code sees: standardised with ImageNet's mean and deviation, see `standardised`.
Masks are given by noise: the patches of the smallest noise are kept.
"""

from argparse import Namespace

import torch
from reference import block, block_shapes, each, embed_patches, layer, linear, norm, random_values
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
EPS = 1e-6  # of norms


def vit_shapes(prefix, depth, dim, mlp_ratio=4.0):
    """Return names and shapes of the blocks `prefix`.0, .1, ..."""
    blocks = (block_shapes(f"{prefix}.{i}", dim, int(dim * mlp_ratio)) for i in range(depth))
    return {name: shape for shapes in blocks for name, shape in shapes.items()}


def encoder_shapes(image_size, patch_size, channels, dim, depth, norm="norm", num_classes=0, mlp_ratio=4.0, **_):
    """Return names and shapes of an encoder; `norm` names its last norm (norm, fc_norm) or is None."""
    shapes = {"cls_token": (1, 1, dim), "pos_embed": (1, 1 + (image_size // patch_size) ** 2, dim)}
    shapes |= layer("patch_embed.proj", dim, channels, patch_size, patch_size)
    shapes |= vit_shapes("blocks", depth, dim, mlp_ratio)
    shapes |= layer(norm, dim) if norm else {}
    return shapes | (layer("head", num_classes, dim) if num_classes else {})


def mae_shapes(wiring="official", skips=None, **size):
    """Return names and shapes of an MAE; the authors' one has `skips` SkipLayers, by default depth / 2."""
    dim, depth, inner = size["dim"], size["depth"], size["decoder_dim"]
    official, values = wiring == "official", size["patch_size"] ** 2 * size["channels"]
    shapes = encoder_shapes(**size, norm="norm" if official else None)
    shapes["decoder_pos_embed"] = (*shapes["pos_embed"][:2], inner)
    shapes["mask_token" if official else "decoder_cls_token"] = (1, 1, inner)
    shapes |= layer("decoder_embed", inner, dim if official else inner)
    shapes |= vit_shapes("decoder_blocks", size["decoder_depth"], inner)
    shapes |= layer("decoder_norm", inner) | layer("decoder_pred", values, inner)
    for j in range(0 if official else depth // 2 if skips is None else skips):
        shapes |= {f"skip.{j}.mask_token": (1, 1, dim)}
        shapes |= layer(f"skip.{j}.fc.0", inner, dim + inner) | layer(f"skip.{j}.fc.2", inner, inner)
    return shapes


def random_state(seed=0, **size):
    """Return a random state_dict of an MAE: the file `full`, or `visualize` without its outer dict."""
    return random_values(mae_shapes(**size), seed)


def encoder_state(seed=0, **size):
    return random_values(encoder_shapes(**size), seed)


def pretrained_file(seed=0, **size):
    """Return the contents of an encoder-only file like mae_pretrain_vit_base.pth."""
    return {"model": encoder_state(seed, **size)}


def full_file(seed=0, **size):
    """Return encoder and decoder, as in mae_pretrain_vit_base_full.pth and mae_visualize_vit_base.pth."""
    return {"model": random_state(seed, **size)}


def finetuned_file(num_classes=5, seed=0, **size):
    """Return a fine-tuned network like mae_finetuned_vit_base.pth: fc_norm on the mean of the patches, no norm."""
    return {"model": encoder_state(seed, norm="fc_norm", num_classes=num_classes, **size)}


def probed_file(num_classes=5, seed=0, norm="norm", **size):
    """Return a linear probe as the official script saves it: a batch norm without weights, then a linear layer."""
    state = encoder_state(seed, norm=norm, num_classes=num_classes, **size)
    weight, bias = state.pop("head.weight"), state.pop("head.bias")
    generator = torch.Generator().manual_seed(seed + 1)
    state["head.0.running_mean"] = torch.randn(size["dim"], generator=generator)
    state["head.0.running_var"] = 0.5 + torch.rand(size["dim"], generator=generator)
    state["head.0.num_batches_tracked"] = torch.tensor(7)
    return training_file(state | {"head.1.weight": weight, "head.1.bias": bias}, Namespace(model="vit_base_patch16"))


def decayed_file(seed=0, min_decay=None, **size):
    """Return the contents of a file of the authors' pre-training, checkpoint-00049.pth."""
    args = Namespace(model="mae_vit_base_patch16", mask_ratio=0.75, norm_pix_loss=True, min_decay=min_decay)
    return training_file(random_state(seed, wiring="decayed", **size), args)


def training_file(state, args, epoch=49):
    optimizer = {"state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 1e-4}]}
    return {"model": state, "optimizer": optimizer, "epoch": epoch, "scaler": {"scale": 65536.0}, "args": args}


def standardise(x):
    """Return RGB images in [-1, 1] as the official code standardises them."""
    mean, std = (torch.tensor(values, dtype=x.dtype).view(3, 1, 1) for values in (MEAN, STD))
    return ((x + 1) / 2 - mean) / std


def number(w, prefix):
    """Return the number of modules `prefix`.0, .1, ..."""
    return len({name.split(".")[1] for name in w if name.split(".")[0] == prefix})


def choose_patches(noise, mask_ratio):
    """Return the indices of the visible patches, (b, k), in the order of their noise."""
    return noise.argsort(dim=1)[:, : int(noise.shape[1] * (1 - mask_ratio))]


def encoder_states(w, x, heads, kept=None, alphas=None, betas=None):
    """Return the states after the embeddings and after every block, with the `kept` patches or with all."""
    alphas, betas = each(alphas), each(betas)
    h = embed_patches(w, "patch_embed.proj", x) + w["pos_embed"][:, 1:]
    if kept is not None:
        h = h[torch.arange(len(h))[:, None], kept]
    states = [torch.cat([(w["cls_token"] + w["pos_embed"][:, :1]).expand(len(h), 1, -1), h], 1)]
    for i in range(number(w, "blocks")):
        states.append(block(w, f"blocks.{i}", states[-1], heads, EPS, alphas, betas))
    return states


def spread(h, kept, mask_token, count):
    """Return all `count` patches after the class token: kept patches in their places, mask tokens elsewhere."""
    patches = mask_token.expand(len(h), count, -1).clone()
    patches[torch.arange(len(h))[:, None], kept] = h[:, 1:]
    return torch.cat([h[:, :1], patches], 1)


def decoder_input(w, states, kept):
    """Return the first state of the decoder, which in the authors' variant does not depend on the images."""
    if "mask_token" in w:
        latent = norm(w, "norm", states[-1], EPS) if "norm.weight" in w else states[-1]
        count = w["decoder_pos_embed"].shape[1] - 1
        return spread(linear(w, "decoder_embed", latent), kept, w["mask_token"], count) + w["decoder_pos_embed"]
    y = torch.cat([w["decoder_cls_token"], w["decoder_pos_embed"][:, 1:]], 1)
    return linear(w, "decoder_embed", y).expand(len(kept), -1, -1)


def mae_forward(w, x, noise, mask_ratio=0.75, *, heads, decoder_heads, alphas=None, betas=None, **_):
    """Return the prediction (b, n, p*p*c) and the mask (b, n), 1 at removed patches."""
    kept = choose_patches(noise, mask_ratio)
    states = encoder_states(w, x, heads, kept, alphas, betas)
    y, last = decoder_input(w, states, kept), len(states) - 1
    for i in range(number(w, "decoder_blocks")):
        if f"skip.{i}.fc.0.weight" in w:  # decoder block i reads encoder block depth - 1 - 2i, counted from 0
            s = spread(states[last - 2 * i], kept, w[f"skip.{i}.mask_token"], noise.shape[1])
            f = functional.silu(linear(w, f"skip.{i}.fc.0", torch.cat([s, y], -1)))
            y = y + linear(w, f"skip.{i}.fc.2", f)
        y = block(w, f"decoder_blocks.{i}", y, decoder_heads, EPS, each(None), each(None))
    mask = torch.ones_like(noise).scatter(1, kept, 0)
    return linear(w, "decoder_pred", norm(w, "decoder_norm", y, EPS))[:, 1:], mask


def targets(x, patch_size, norm_pix=True):
    """Return the targets of all patches, (b, n, p*p*c): rows, columns, then channels; patches row by row."""
    count, channels, size, _ = x.shape
    cells = x.reshape(count, channels, size // patch_size, patch_size, size // patch_size, patch_size)
    values = torch.einsum("nchpwq->nhwpqc", cells).flatten(3).flatten(1, 2)
    if not norm_pix:
        return values
    return (values - values.mean(-1, keepdim=True)) / (values.var(-1, keepdim=True) + 1e-6).sqrt()


def loss(x, prediction, mask, patch_size, norm_pix=True):
    """Return the mean squared error of the removed patches."""
    errors = (prediction - targets(x, patch_size, norm_pix)).square().mean(-1)
    return errors[mask == 1].mean()


def pool(w, x, heads, alphas=None, betas=None):
    """Return the input of the head: the normed mean of the patches, or the class token of the normed state."""
    h = encoder_states(w, x, heads, None, alphas, betas)[-1]
    if "fc_norm.weight" in w:
        return norm(w, "fc_norm", h[:, 1:].mean(1), EPS)
    return (norm(w, "norm", h, EPS) if "norm.weight" in w else h)[:, 0]


def logits(w, x, heads, alphas=None, betas=None):
    """Return the output of a fine-tuned network, or of a linear probe in evaluation."""
    features = pool(w, x, heads, alphas, betas)
    if "head.weight" in w:
        return linear(w, "head", features)
    features = (features - w["head.0.running_mean"]) / (w["head.0.running_var"] + 1e-6).sqrt()
    return linear(w, "head.1", features)


def inputs(image_size=8, channels=3, patch_size=2, count=3, seed=1, **_):
    """Return random images and the noise of their patches."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, channels, image_size, image_size, generator=generator) * 2 - 1
    return x, torch.rand(count, (image_size // patch_size) ** 2, generator=generator)
