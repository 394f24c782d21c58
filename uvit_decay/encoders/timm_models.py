"""Models of timm: their token states for probes, their pooled features for metrics, and the one way to open them.

b = images, n = tokens, d = features.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.checkpoint.detect import read_third_party
from uvit_decay.files.tensor_files import check_weights, mismatch
from uvit_decay.files.validation import as_type
from uvit_decay.generation.options import TIMM
from uvit_decay.nn.embed import PixelScale
from uvit_decay.nn.intermediates import block_layers
from uvit_decay.terminal.errors import UserError, explain

if TYPE_CHECKING:  # slow to import
    from timm.models.vision_transformer import VisionTransformer

OUTSIDE = ("head", "fc_norm", "decoder_")  # beginnings of names that an encoder does not have
MAPS = ("model", "state_dict")  # keys of training files under which the weights may be stored


class TimmViT(nn.Module):
    """A timm VisionTransformer that takes images in [-1, 1], as all networks here, and yields its token states.

    Attributes:
        model: the vision transformer.
        scale: conversion of images to the mean and standard deviation of the pretraining.
    """

    null_label = False
    num_classes = 0

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.model = model
        self.image_size, _ = model.patch_embed.img_size
        self.dim = model.embed_dim
        self.channels = model.patch_embed.proj.in_channels
        self.num_prefix_tokens = model.num_prefix_tokens
        self.class_token = model.cls_token is not None
        mean = tuple(model.pretrained_cfg["mean"])
        std = tuple(model.pretrained_cfg["std"])
        self.scale = PixelScale(mean, std)
        self.norm = model.norm
        self.layers = block_layers([f"blocks.{i}" for i in range(len(model.blocks))], denoiser=False)

    def forward_intermediates(self, x: Float[Tensor, "b c h w"]) -> Iterator[Float[Tensor, "b n d"]]:
        """Yield the token states [prefix, patches] after the embeddings and after every block, before the final norm.

        timm's `forward_intermediates` holds all states at once and leaves out the embeddings.
        """
        model = self.model
        patches = model.patch_embed(self.scale.normalise(x))
        tokens = model.norm_pre(model.patch_drop(model._pos_embed(patches)))
        yield tokens
        for block in model.blocks:
            tokens = block(tokens)
            yield tokens


class TimmFeatures(nn.Module):
    """Pooled features of a model of timm, which takes images in [-1, 1], as all networks here.

    Args:
        model: the model, in eval mode, without classifier.
        config: timm's data configuration of the model.
    """

    def __init__(self, model: nn.Module, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.channels, self.image_size, _ = config["input_size"]
        self.scale = PixelScale(tuple(config["mean"]), tuple(config["std"]))
        with torch.no_grad():
            features, _ = self(torch.zeros(1, *config["input_size"]))
        self.dim = features.shape[1]

    def forward(self, x: Float[Tensor, "b c h w"]) -> tuple[Float[Tensor, "b d"], None]:
        states = self.model.forward_features(self.scale.normalise(x))
        return self.model.forward_head(states, pre_logits=True).float(), None


def timm_vit(name: str, file: Path | None = None, size: int | None = None) -> TimmViT:
    """Return timm's vision transformer `name` in eval mode, with pretrained weights or the weights of a file.

    Pretrained weights come from the cache of the hub, or are downloaded.

    Args:
        name: timm's name of the model.
        file: a .safetensors or a file of torch.save, in which no code is executed: a timm state_dict, or an official
            MAE, whose decoder is left out, or an official DINOv2. None for pretrained weights.
        size: side of the images that the model takes, to which its positions are interpolated; None for its own.
    """
    import timm
    from timm.models.vision_transformer import VisionTransformer

    with explain(f"timm {name}", RuntimeError, ValueError), torch.device("meta"):
        model = timm.create_model(name, num_classes=0)
    if not isinstance(model, VisionTransformer):
        raise UserError(f"timm {name} is a {type(model).__name__}: choose a VisionTransformer of timm")
    patch = model.patch_embed.patch_size[0]
    if size is not None and size % patch:
        raise UserError(f"timm {name} cannot take images of size {size}: choose a multiple of its patch size {patch}")
    return TimmViT(open_timm(name, file, size))


def open_timm(name: str, file: Path | None = None, size: int | None = None) -> nn.Module:
    """Return timm's model `name` in eval mode, without classifier, with pretrained weights or the weights of a file.

    Args:
        name: timm's name of the model.
        file: as in `timm_vit`; None for pretrained weights, whose licence is printed.
        size: side of the images that the model takes; None for its own.
    """
    import timm

    sizes = {} if size is None else {"img_size": size}
    if file is not None:
        with explain(f"timm {name}", RuntimeError, ValueError):
            model = timm.create_model(name, num_classes=0, **sizes)
        load_timm_weights(model, name, file)
        return model.eval()
    hint = f"to read them from a file, give {TIMM}{name}=FILE"
    with explain(f"weights of timm {name}", OSError, RuntimeError, ValueError, hint=hint):
        model = timm.create_model(name, pretrained=True, num_classes=0, **sizes)
    if licence := model.pretrained_cfg.get("license"):
        print(f"{name}: licence {licence}")
    return model.eval()


def load_timm_weights(model: nn.Module, name: str, file: Path) -> None:
    """Load the weights of a file into timm's model `name`, which has no classifier.

    Weights of the encoder must not be missing: a decayed MAE has no final norm, which the plain one needs.
    """
    from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

    contents = as_type(dict[str, object], read_third_party(file), f"contents of {file}")
    for key in MAPS:
        if isinstance(contents.get(key), dict):
            contents = contents[key]
            break
    weights = as_type(dict[str, Tensor], contents, f"weights in {file}")
    check_weights(file, weights)
    own = model.state_dict().keys()
    classifiers = model.pretrained_cfg.get("classifier") or ()  # a distilled model has two
    if isinstance(classifiers, str):
        classifiers = (classifiers,)
    outside = (*OUTSIDE, *classifiers)
    state = {key: value for key, value in weights.items() if key in own or not key.startswith(outside)}
    if isinstance(model, VisionTransformer):
        with explain(f"{file} does not fit {name}", Exception):  # timm uses the weights without a check of shapes
            tokens = state.get("reg_token", state.get("register_tokens"))  # named by timm or facebookresearch/dinov2
            registers = 0
            if tokens is not None:
                registers = tokens.shape[1]
            if registers != model.num_reg_tokens:  # timm would take them for patches, or patches for them
                raise ValueError(f"it has {registers} register tokens, not {model.num_reg_tokens}")
            state = checkpoint_filter_fn(state, model)
    if problem := mismatch(model, state, name):
        hint = "convert decayed and fine-tuned MAEs with uvit-decay import"
        raise UserError(f"{file} does not fit {name}: {problem}; {hint}")
    model.load_state_dict(state)
