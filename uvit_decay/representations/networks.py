"""Networks named on the command line, to be judged by their features: checkpoints of this project and timm's models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import interpolate

from uvit_decay import checkpoint
from uvit_decay.autoencoder import LatentSpace
from uvit_decay.checkpoint.io import read_third_party
from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.history import run_of
from uvit_decay.nn.embed import PixelScale
from uvit_decay.nn.intermediates import Layer, block_layers
from uvit_decay.runtime.errors import UserError, check_whole, explained
from uvit_decay.runtime.files import at_home
from uvit_decay.runtime.tensor_files import check_weights, mismatch
from uvit_decay.runtime.validation import typed
from uvit_decay.sampling_options import LoadingOptions

if TYPE_CHECKING:  # timm is slow to import, and data are Lightning's
    from timm.models.vision_transformer import VisionTransformer

    from uvit_decay.data import ImageData

TIMM = "timm:"  # timm:NAME, with pretrained weights, or timm:NAME=FILE
PIXELS = "pixels:"  # pixels:32x32x3


@dataclass(frozen=True)
class ProbedNetwork:
    """A network in eval mode whose features are judged.

    Args:
        net: the network.
        name: name of files of results.
        title: name in titles.
        about: which weights these are, for reports, as plain values.
        path: noise path of a denoiser's input; None for an encoder, which sees clean images.
        data: name of the images that it was trained on; None if that is not known.
        latents: latent space of its input; None for pixels.
    """

    net: nn.Module
    name: str
    title: str
    about: dict[str, Any]
    path: NoisePath | None = None
    data: str | None = None
    latents: LatentSpace | None = None

    @property
    def is_encoder(self) -> bool:
        """Return whether it sees clean images."""
        return self.path is None


def open_network(ckpt: Path, loading: LoadingOptions, size: int | None = None) -> ProbedNetwork:
    """Load a checkpoint, timm's vision transformer timm:NAME or timm:NAME=FILE, or raw pixels, pixels:32x32x3.

    `size` is the side of the images that a timm model takes, None its own.
    """
    name = str(ckpt)
    if not name.startswith((TIMM, PIXELS)):
        return _checkpoint(ckpt, loading)
    if loading.weights is not None:
        raise UserError(f"--weights are of checkpoints of this project, {ckpt} has no such choice")
    if name.startswith(PIXELS):
        about = {"checkpoint": name, "weights": "none"}
        return ProbedNetwork(Pixels(name.removeprefix(PIXELS)), name.replace(":", "-"), "raw pixels", about)
    model, _, file = name.removeprefix(TIMM).partition("=")
    about = {"checkpoint": name, "weights": file or "pretrained", "model": f"timm {model}"}
    net = timm_vit(model, at_home(file) if file else None, size)
    return ProbedNetwork(net, f"{model}-{Path(file).stem}" if file else model, model, about)


def _checkpoint(path: Path, loading: LoadingOptions) -> ProbedNetwork:
    found = checkpoint.load(path, loading.weights, loading.trust)
    about = {"checkpoint": str(path), "step": found.card.step, "weights": found.card.weights}
    run = run_of(path.resolve())  # whose name and version are part of the name: "digits-version_1-"
    of_run = f"{run.parent.name}-{run.name}-" if run is not None and run.name.startswith("version_") else ""
    name = f"{of_run}{path.stem}-step{found.card.step}-{found.card.weights}"
    return ProbedNetwork(found.net, name, path.name, about, found.path, found.card.data, found.card.latents)


def open_judging_data(judged: ProbedNetwork, data: str | None, test: str | None) -> ImageData:
    """Open the data to judge a network's features on, by default those that it was trained on; see `open_data`."""
    from uvit_decay.evaluation.open_by_name import SETS, open_data

    if data is None and judged.data not in SETS:
        trained = f"was trained on {judged.data}: name it, or other data," if judged.data else "needs images: name some"
        raise UserError(f"{judged.name} {trained} with --data")
    return open_data(data or judged.data, test, judged.net.image_size, judged.net.channels, judged.is_encoder)


def fit_pictures(x: Float[Tensor, "b c h w"], net: nn.Module, where: str) -> Float[Tensor, "b c2 h2 w2"]:
    """Return pictures of [-1, 1] in the channels and the size that a network takes; grey ones are repeated.

    Pictures of another size are resized, bicubic with antialias, and clamped.

    Raises:
        UserError: other channels; `where` is the beginning of the message.
    """
    if x.shape[1] != net.channels:
        if x.shape[1] != 1:
            raise UserError(f"{where} has {net.channels} channels, the images have {x.shape[1]}")
        x = x.expand(-1, net.channels, -1, -1)
    if x.shape[-1] == net.image_size:
        return x
    return interpolate(x, size=(net.image_size,) * 2, mode="bicubic", antialias=True).clamp(-1, 1)


class Pixels(nn.Module):
    """A network whose only layer is the image itself, values in [-1, 1] in one token of dim = channels * size^2.

    Args:
        size: WIDTHxHEIGHTxCHANNELS of the images, such as 32x32x3; width and height are equal.
    """

    layers = (Layer("pixels", "embeddings"),)
    num_prefix_tokens, num_classes, null_label, class_token = 0, 0, False, False

    def __init__(self, size: str) -> None:
        super().__init__()
        found = re.fullmatch(r"(\d{1,5})x(\d{1,5})x(\d{1,5})", size)
        if not found or found[1] != found[2]:
            raise UserError(f"pixels:{size}: the size of square images is needed, such as pixels:32x32x3")
        self.image_size, self.channels = int(found[1]), int(found[3])
        check_whole(1, 2**16, width=self.image_size, channels=self.channels)
        self.dim = self.channels * self.image_size**2

    def forward_intermediates(self, x: Float[Tensor, "b c h w"]) -> Iterator[Float[Tensor, "b 1 d"]]:
        """Yield the pixels of each image as one token."""
        yield x.flatten(1)[:, None]


OUTSIDE = ("head", "fc_norm", "mask_token", "decoder_")  # beginnings of names that an encoder does not have
MAPS = ("model", "state_dict")  # where training files keep the weights


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
        self.layers = block_layers([f"blocks.{i}" for i in range(len(model.blocks))], denoiser=False)

    def forward_intermediates(self, x: Float[Tensor, "b c h w"]) -> Iterator[Float[Tensor, "b n d"]]:
        """Yield the token states [prefix, patches] after the embeddings and after every block, not normed.

        `timm.forward_intermediates` gives the same, but holds all of them at once and leaves out the embeddings.
        """
        model = self.model
        tokens = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(self.scale.normalise(x)))))
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

    contents = typed(dict[str, object], read_third_party(file), f"contents of {file}")
    contents = next((contents[key] for key in MAPS if isinstance(contents.get(key), dict)), contents)
    state = typed(dict[str, Tensor], contents, f"weights in {file}")
    check_weights(file, state)
    state = {key: value for key, value in state.items() if not key.startswith(OUTSIDE)}
    with explained(f"{file} does not fit {name}", Exception):  # timm looks at no shape before it uses it
        state = checkpoint_filter_fn(state, model)
    if problem := mismatch(model, state, name):
        raise UserError(f"{file} does not fit {name}: {problem}; decayed and fine-tuned MAEs: uvit-decay import")
    model.load_state_dict(state)
