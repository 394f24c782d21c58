"""timm's vision transformers as encoders: their token states under the interface that probes and figures read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.nn.embed import PixelScale
from uvit_decay.nn.intermediates import Layer
from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.plain import typed

if TYPE_CHECKING:  # slow to import
    from timm.models.vision_transformer import VisionTransformer

OUTSIDE = ("head", "fc_norm", "mask_token", "decoder_")  # beginnings of names that an encoder does not have
MAPS = ("model", "state_dict")  # where training files keep the weights

IMPORT = "decayed and fine-tuned MAEs: python -m uvit_decay.checkpoint import"


class TimmViT(nn.Module):
    """A timm VisionTransformer, which takes images of [-1, 1], as all networks here, and yields its token states.

    Attributes:
        model: the vision transformer.
        scale: mean and standard deviation of its pretraining, to which images are brought.
    """

    null_label = False
    num_classes = 0

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        height, width = model.patch_embed.img_size
        if height != width:
            raise UserError(f"this vision transformer takes images of {width}x{height}, features are of square ones")
        self.model, self.image_size, self.dim = model, height, model.embed_dim
        self.channels = model.patch_embed.proj.in_channels
        self.num_prefix_tokens, self.class_token = model.num_prefix_tokens, model.cls_token is not None
        self.scale = PixelScale(tuple(model.pretrained_cfg["mean"]), tuple(model.pretrained_cfg["std"]))
        self.norm = model.norm
        self.layers = (
            Layer("embeddings", "embeddings"),
            *(Layer(f"blocks.{i}", "encoder") for i in range(len(model.blocks))),
        )

    def forward_intermediates(self, x: Float[Tensor, "b c h w"]) -> Iterator[Float[Tensor, "b n d"]]:
        """Yield the token states [prefix, patches] after the embeddings and after every block, not normed.

        `timm.forward_intermediates` gives the same, but holds all of them at once and leaves out the embeddings.
        """
        model = self.model
        tokens = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(self.scale.enter(x)))))
        yield tokens
        for block in model.blocks:
            tokens = block(tokens)
            yield tokens


def timm_vit(name: str, file: Path | None = None, size: int | None = None) -> TimmViT:
    """Return timm's vision transformer `name` in eval mode, with pretrained weights or those of a file.

    `size` is the side of the images that it takes, to which its positions are interpolated; None its own.

    Pretrained weights come from the cache of the hub, or are downloaded. A file may be a .safetensors or a file of
    torch.save, in which no code is executed: a timm state_dict, or an official MAE, whose decoder is left out.

    Raises:
        UserError: no such model or no vision transformer, weights that cannot be fetched or read, or do not fit.
    """
    import timm
    from timm.models.vision_transformer import VisionTransformer

    if not timm.is_model(name):
        raise UserError(f"timm has no model {name}: timm.list_models('vit_*', pretrained=True) names some with weights")
    with explained(f"timm {name}", RuntimeError, ValueError), torch.device("meta"):
        model = timm.create_model(name, num_classes=0)
    if not isinstance(model, VisionTransformer):
        raise UserError(f"{name} is a {type(model).__name__}: features are read from timm's VisionTransformer alone")
    if size is not None and size % model.patch_embed.patch_size[0]:
        raise UserError(f"timm {name} has patches of {model.patch_embed.patch_size[0]}: {size} is no multiple of it")
    if file is not None:
        model = timm.create_model(name, num_classes=0, img_size=size)
        _load(model, name, file)
    else:
        with explained(f"weights of timm {name}", OSError, RuntimeError, ValueError, hint="or name a file: =FILE"):
            model = timm.create_model(name, pretrained=True, num_classes=0, img_size=size)
        if licence := model.pretrained_cfg.get("license"):
            print(f"{name}: licence {licence}")
    return TimmViT(model.eval())


def _load(model: VisionTransformer, name: str, file: Path) -> None:
    """Load the weights of a file; all of the encoder must be there, as a decayed MAE lacks the norm of a plain one."""
    from timm.models.vision_transformer import checkpoint_filter_fn

    from uvit_decay.checkpoint.io import check_weights, mismatch, read_third_party

    contents = typed(dict[str, object], read_third_party(file), f"contents of {file}")
    contents = next((contents[key] for key in MAPS if isinstance(contents.get(key), dict)), contents)
    state = typed(dict[str, Tensor], contents, f"weights in {file}")
    check_weights(file, state)
    state = {key: value for key, value in state.items() if not key.startswith(OUTSIDE)}
    with explained(f"{file} does not fit {name}", Exception):  # timm looks at no shape before it uses it
        state = checkpoint_filter_fn(state, model)
    if problem := mismatch(model, state, name):
        raise UserError(f"{file} does not fit {name}: {problem}; {IMPORT}")
    model.load_state_dict(state)
