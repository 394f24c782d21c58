"""Networks whose features are evaluated, by the names of the command line: checkpoints, timm's models, raw pixels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import interpolate

from uvit_decay import checkpoint
from uvit_decay.checkpoint.detect import read_third_party
from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.generation.options import TIMM, LoadingOptions
from uvit_decay.latents.space import LatentSpace
from uvit_decay.nn.embed import PixelScale
from uvit_decay.nn.intermediates import Layer, block_layers
from uvit_decay.runs.history import name_run, run_of
from uvit_decay.runtime.errors import UserError, check_whole, explain
from uvit_decay.runtime.files import at_home
from uvit_decay.runtime.tensor_files import check_weights, mismatch
from uvit_decay.runtime.typed import check_types
from uvit_decay.runtime.validation import as_type

if TYPE_CHECKING:  # timm is slow to import, and data are Lightning's
    from timm.models.vision_transformer import VisionTransformer

    from uvit_decay.data import ImageData

Interpolation = Literal["bilinear", "bicubic"]
PIXELS = "pixels:"  # pixels:32x32x3


@dataclass(frozen=True)
class ProbedNetwork:
    """A network in eval mode whose features are evaluated.

    Args:
        net: the network.
        name: name of the network in names of result files.
        title: name of the network in titles.
        about: description of the weights for reports, as plain values.
        path: noise path of a denoiser's input; None for an encoder, which sees clean images.
        data: name of the images that the network was trained on; None if unknown.
        latents: latent space of the network's input; None for pixels.
        class_names: names of the classes of a classifier or of a conditional denoiser; empty if there are none.
        fingerprint: fingerprint of the images that the network was trained on; None if it is not known.
    """

    net: nn.Module
    name: str
    title: str
    about: dict[str, Any]
    path: NoisePath | None = None
    data: str | None = None
    latents: LatentSpace | None = None
    class_names: tuple[str, ...] = ()
    fingerprint: str | None = None

    @property
    def is_encoder(self) -> bool:
        """True if the network sees clean images."""
        return self.path is None


def final_norm(net: nn.Module) -> nn.Module | None:
    """Return the layer norm that a network applies after its last block; None if it has none."""
    return dict(net.named_children()).get("norm")


@check_types
def open_network(ckpt: Path, loading: LoadingOptions, size: int | None = None) -> ProbedNetwork:
    """Load a checkpoint, timm's vision transformer timm:NAME or timm:NAME=FILE, or raw pixels, pixels:32x32x3.

    Args:
        ckpt: path of the checkpoint, or one of these names.
        loading: options of loading a checkpoint.
        size: side of the images that a timm model takes, in pixels; None for the model's own.

    Raises:
        UserError: the network cannot be opened, or `loading` chooses weights that only checkpoints have.
    """
    name = str(ckpt)
    if not name.startswith((TIMM, PIXELS)):
        return _open_checkpoint(ckpt, loading)
    if loading.weights is not None:
        raise UserError(f"--weights {loading.weights}: only checkpoints of uvit_decay have ema and raw, {ckpt} has not")
    if name.startswith(PIXELS):
        about = {"checkpoint": name, "weights": "none"}
        net = Pixels(name.removeprefix(PIXELS))
        return ProbedNetwork(net, name.replace(":", "-"), "raw pixels", about)
    return _open_timm(name, size)


def _open_checkpoint(path: Path, loading: LoadingOptions) -> ProbedNetwork:
    """Open a checkpoint of uvit_decay; its run's name and version are part of the name: "digits-version_1-"."""
    loaded = checkpoint.load(path, loading.weights, loading.trust)
    card = loaded.card
    about = {"checkpoint": str(path), "step": card.step, "weights": card.weights}
    name = f"{path.stem}-step{card.step}-{card.weights}"
    run = run_of(path.resolve())
    if run is not None and run.name.startswith("version_"):
        name = f"{run.parent.name}-{run.name}-{name}"
    titled = path.name
    if run is not None and path.suffix == ".ckpt":  # exported files, as in checkpoints/, are named by themselves
        titled = name_run(run)
    title = f"{titled}, step {card.step}"
    return ProbedNetwork(
        loaded.net, name, title, about, loaded.path, card.data, card.latents, card.class_names, card.data_hash
    )


def _open_timm(name: str, size: int | None) -> ProbedNetwork:
    """Open timm:NAME or timm:NAME=FILE."""
    model, _, file = name.removeprefix(TIMM).partition("=")
    about = {"checkpoint": name, "weights": file or "pretrained", "model": f"timm {model}"}
    if not file:
        return ProbedNetwork(timm_vit(model, None, size), model, model, about)
    net = timm_vit(model, at_home(file), size)
    return ProbedNetwork(net, f"{model}-{Path(file).stem}", model, about)


def open_probed_data(network: ProbedNetwork, data: str | None, test: str | None) -> ImageData:
    """Open the data on which a network's features are evaluated.

    Args:
        network: the network.
        data: name of the data as in `open_data`; None for the data that the network was trained on.
        test: path of test images; None for the data's own.

    Raises:
        UserError: no data is named and the training data cannot be opened by its name, or the data does not fit.
    """
    from uvit_decay.data.named import SETS, open_data

    if data is None and network.data not in SETS:
        if not network.data:
            raise UserError(f"{network.name} needs images: name them with --data")
        raise UserError(f"{network.name} was trained on {network.data}: name this data, or other data, with --data")
    net = network.net
    opened = open_data(data or network.data, test, net.image_size, net.channels, network.is_encoder)
    if data is None and network.fingerprint not in (None, opened.fingerprint):
        raise UserError(
            f"{network.name} was trained on other images called {network.data}: name this data, or other data, with "
            "--data"
        )
    return opened


def fit_pictures(
    x: Float[Tensor, "b c h w"], net: nn.Module, where: str, mode: Interpolation = "bicubic"
) -> Float[Tensor, "b c2 h2 w2"]:
    """Return pictures in [-1, 1] with the number of channels and the size that a network takes.

    Grey pictures are repeated for all channels. Pictures of another size are resized with antialias and clamped.

    Args:
        x: pictures in [-1, 1].
        net: the network.
        where: name of the network, at the beginning of the error message.
        mode: how pictures are resized.

    Raises:
        UserError: the pictures have another number of channels and are not grey.
    """
    if x.shape[1] != net.channels:
        if x.shape[1] != 1:
            raise UserError(f"{where} has {net.channels} channels, the images have {x.shape[1]}")
        x = x.expand(-1, net.channels, -1, -1)
    if x.shape[-1] == net.image_size:
        return x
    return interpolate(x, size=(net.image_size,) * 2, mode=mode, antialias=True).clamp(-1, 1)


class Pixels(nn.Module):
    """A network whose only layer is the image itself, values in [-1, 1] in one token of dim = channels * size^2.

    Args:
        size: WIDTHxHEIGHTxCHANNELS of the images, such as 32x32x3; width and height are equal.

    Raises:
        UserError: the size has another form.
    """

    layers = (Layer("pixels", "embeddings"),)
    num_prefix_tokens = 0
    num_classes = 0
    null_label = False
    class_token = False

    def __init__(self, size: str) -> None:
        super().__init__()
        numbers = re.fullmatch(r"(\d{1,5})x(\d{1,5})x(\d{1,5})", size)
        if not numbers or numbers[1] != numbers[2]:
            raise UserError(f"pixels:{size}: not a size of square images; write it as in pixels:32x32x3")
        self.image_size = int(numbers[1])
        self.channels = int(numbers[3])
        check_whole(1, 2**16, width=self.image_size, channels=self.channels)
        self.dim = self.channels * self.image_size**2

    def forward_intermediates(self, x: Float[Tensor, "b c h w"]) -> Iterator[Float[Tensor, "b 1 d"]]:
        """Yield the pixels of each image as one token."""
        yield x.flatten(1)[:, None]


OUTSIDE = ("head", "fc_norm", "decoder_")  # beginnings of names that an encoder does not have
MAPS = ("model", "state_dict")  # keys of training files under which the weights may be stored


class TimmViT(nn.Module):
    """A timm VisionTransformer that takes images in [-1, 1], as all networks here, and yields its token states.

    Attributes:
        model: the vision transformer.
        scale: conversion of images to the mean and standard deviation of the pretraining.

    Raises:
        UserError: the vision transformer takes images that are not square.
    """

    null_label = False
    num_classes = 0

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        height, width = model.patch_embed.img_size
        if height != width:
            raise UserError(f"this vision transformer takes {width}x{height} images: choose one for square images")
        self.model = model
        self.image_size = height
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


def timm_vit(name: str, file: Path | None = None, size: int | None = None) -> TimmViT:
    """Return timm's vision transformer `name` in eval mode, with pretrained weights or the weights of a file.

    Pretrained weights come from the cache of the hub, or are downloaded.

    Args:
        name: timm's name of the model.
        file: a .safetensors or a file of torch.save, in which no code is executed: a timm state_dict, or an official
            MAE, whose decoder is left out, or an official DINOv2. None for pretrained weights.
        size: side of the images that the model takes, to which its positions are interpolated; None for its own.

    Raises:
        UserError: timm has no vision transformer of this name, or the weights cannot be fetched or read, or do not fit.
    """
    import timm
    from timm.models.vision_transformer import VisionTransformer

    check_timm_name(name)
    with explain(f"timm {name}", RuntimeError, ValueError), torch.device("meta"):
        model = timm.create_model(name, num_classes=0)
    if not isinstance(model, VisionTransformer):
        raise UserError(f"timm {name} is a {type(model).__name__}: choose a VisionTransformer of timm")
    patch = model.patch_embed.patch_size[0]
    if size is not None and size % patch:
        raise UserError(f"timm {name} cannot take images of size {size}: choose a multiple of its patch size {patch}")
    if file is not None:
        model = timm.create_model(name, num_classes=0, img_size=size)
        load_timm_weights(model, name, file)
    else:
        model = load_pretrained(name, img_size=size)
    return TimmViT(model.eval())


def check_timm_name(name: str) -> None:
    """Raise a UserError unless timm has a model of this name."""
    import timm

    if not timm.is_model(name):
        raise UserError(f"timm has no model {name}: timm.list_models('vit_*', pretrained=True) names some with weights")


def load_pretrained(name: str, **sizes: int | None) -> nn.Module:
    """Return timm's model `name` without classifier, with its pretrained weights; print their licence.

    Args:
        name: timm's name of the model.
        sizes: further arguments of `timm.create_model`.

    Raises:
        UserError: the weights are not in the cache of the hub and cannot be fetched.
    """
    import timm

    hint = f"to read them from a file, give {TIMM}{name}=FILE"
    with explain(f"weights of timm {name}", OSError, RuntimeError, ValueError, hint=hint):
        model = timm.create_model(name, pretrained=True, num_classes=0, **sizes)
    if licence := model.pretrained_cfg.get("license"):
        print(f"{name}: licence {licence}")
    return model


def load_timm_weights(model: nn.Module, name: str, file: Path) -> None:
    """Load the weights of a file into timm's model `name`, which has no classifier.

    Weights of the encoder must not be missing: a decayed MAE has no final norm, which the plain one needs.

    Raises:
        UserError: the file cannot be read, or its weights do not fit.
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
    outside = OUTSIDE + _name_classifiers(model)
    state = {key: value for key, value in weights.items() if key in own or not key.startswith(outside)}
    if isinstance(model, VisionTransformer):
        with explain(f"{file} does not fit {name}", Exception):  # timm uses the weights without a check of shapes
            registers = _count_registers(state)
            if registers != model.num_reg_tokens:  # timm would take them for patches, or patches for them
                raise ValueError(f"it has {registers} register tokens, not {model.num_reg_tokens}")
            state = checkpoint_filter_fn(state, model)
    if problem := mismatch(model, state, name):
        hint = "convert decayed and fine-tuned MAEs with uvit-decay import"
        raise UserError(f"{file} does not fit {name}: {problem}; {hint}")
    model.load_state_dict(state)


def _count_registers(state: Mapping[str, Tensor]) -> int:
    """Return the number of register tokens in weights with the names of timm or of facebookresearch/dinov2."""
    for name in ("reg_token", "register_tokens"):
        if name in state:
            return state[name].shape[1]
    return 0


def _name_classifiers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the linear classifiers of timm's model: none, one, or two of a distilled model."""
    classifiers = model.pretrained_cfg.get("classifier") or ()
    if isinstance(classifiers, str):
        return (classifiers,)
    return tuple(classifiers)
