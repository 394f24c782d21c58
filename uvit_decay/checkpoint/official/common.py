"""Shared parts of the importers of official files: the caller's options, a state_dict to recognise, its network."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from uvit_decay.checkpoint.io import ModelCard
from uvit_decay.checkpoint.options import PathName, Weights
from uvit_decay.diffusion.noise_path import GVP, VP, DDPMLinear, Linear, NoisePath, SDDiscrete
from uvit_decay.diffusion.prediction import Prediction
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.files.instantiate import Spec
from uvit_decay.files.tensor_files import mismatch
from uvit_decay.files.validation import as_type
from uvit_decay.latents.autoencoder import absolute_name
from uvit_decay.latents.space import LatentSpace
from uvit_decay.nn.mae import MAE
from uvit_decay.nn.sit import SiT
from uvit_decay.nn.uvit import UViT
from uvit_decay.nn.vit import ViT
from uvit_decay.terminal.errors import UserError

PATHS: dict[PathName, NoisePath] = {
    "linear": Linear(),
    "gvp": GVP(),
    "vp": VP(),
    "sd-discrete": SDDiscrete(),
    "ddpm-linear": DDPMLinear(),
}
STABLE_DIFFUSION = LatentSpace("stabilityai/sd-vae-ft-ema", sha256="", scale=0.18215, shift=0.0, channels=4, factor=8)
IMPORTED = "unknown, imported from "  # data of an imported network, before the name of its file
Network = UViT | SiT | MAE | ViT
Net = TypeVar("Net", UViT, SiT, MAE, ViT)
EPSILON = 4e-3  # tolerance for alphas: the precision of bfloat16


def build_on_meta(kind: type[Net], **config: Any) -> Net:
    """Return the network with these arguments on the meta device: names and shapes, which take no memory."""
    with torch.device("meta"):
        return kind(**config)


@dataclass(frozen=True)
class RecognisedModel:
    """A recognised official file: its network, weights and settings of training.

    An MAE or ViT has no noise path, prediction and sampling.

    Args:
        net: the network, on the meta device.
        state: its weights.
        size: name of the published size; None for other sizes.
        path: noise path.
        prediction: quantity that the network predicts.
        sampling: default sampling.
        latents: latent space; None for a network of pixels.
        decayed: whether the file has the layout of the decay's authors, which does not determine alpha_min.
        weights: the set of weights in a file that does not name it.
        notes: lines for the user.
        class_names: names of the classes; None for numbers.
    """

    net: Network
    state: dict[str, Tensor]
    size: str | None
    path: PathName | None = None
    prediction: Prediction | None = None
    sampling: Sampling | None = None
    latents: LatentSpace | None = None
    decayed: bool = False
    weights: Weights = "ema"
    notes: tuple[str, ...] = ()
    class_names: tuple[str, ...] | None = None

    def card(self, origin: str, step: int = 0, weights: Weights | None = None) -> ModelCard:
        """Return the model card of the network, imported from the file `origin`."""
        path = None
        if self.path:
            noise_path = PATHS[self.path]
            path = Spec.of(type(noise_path), asdict(noise_path))
        return ModelCard(
            net=Spec.of(type(self.net), self.net.config),
            path=path,
            prediction=self.prediction,
            sampling=self.sampling,
            class_names=self.class_names or tuple(map(str, range(self.net.num_classes))),
            data=IMPORTED + origin,
            step=step,
            latents=self.latents,
            weights=weights or self.weights,
        )

    def summary(self) -> str:
        """Return one line for the user to verify: size, prediction and path, and all arguments of the network."""
        config = self.net.config
        size = self.size or type(self.net).__name__.lower()
        count = sum(value.numel() for value in self.state.values())
        settings = []
        if self.path:
            kind = "latents" if self.latents else "pixels"
            settings += [f"{self.prediction} of {kind}", f"path {self.path}"]
        settings += [f"{name} {value}" for name, value in config.items()]
        numbers = f"{config['heads']} heads, {count:,} parameters"
        return f"{size}/{config['patch_size']} ({numbers}), {', '.join(settings)}"


@dataclass(frozen=True)
class StateDict:
    """A state_dict that looks like one of `family`.

    Its methods raise a UserError for entries or options that no network of the family has.

    Args:
        state: its entries.
        family: name of the family, for error messages.
        where: path of its file, for error messages.
        arguments: the recorded arguments of the training run.
    """

    state: Mapping[str, Tensor]
    family: str
    where: Path
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.state.items():
            if not isinstance(value, Tensor):
                raise self.error(f"its {name} is a {type(value).__name__}, not a tensor")

    def error(self, what: str) -> UserError:
        """Return the error for a state_dict that does not fit its family, with the mismatch `what`."""
        return UserError(f"{self.where} looks like a {self.family}, but {what}")

    def shape(self, name: str, rank: int) -> torch.Size:
        """Return the shape of a required entry, which has this rank and is not empty."""
        if name not in self.state:
            raise self.error(f"it lacks {name}")
        shape = self.state[name].shape
        if len(shape) != rank or 0 in shape:
            raise self.error(f"its {name} has the shape {tuple(shape)}")
        return shape

    def image_layout(self, patches: str, num_prefix_tokens: int) -> dict[str, int]:
        """Return the image and patch arguments of the network.

        The convolution `patches` embeds patches as tokens; prefix tokens have positions, too.
        """
        dim, channels, patch_size, _ = self.shape(f"{patches}.weight", 4)
        tokens = self.shape("pos_embed", 3)[1] - num_prefix_tokens
        side = math.isqrt(max(tokens, 0))
        if side < 1 or side**2 != tokens:
            raise UserError(
                f"{self.where} has {tokens} positions for patches, which do not make a square image: not supported"
            )
        return {"image_size": side * patch_size, "patch_size": patch_size, "channels": channels, "dim": dim}

    def blocks(self, *lists: str) -> int:
        """Return the number of blocks in the longest of these module lists, from its highest index; at least 1."""
        highest = 0
        for name in self.state:
            module, _, rest = name.partition(".")
            index = rest.partition(".")[0]
            if module in lists and index.isdecimal():
                highest = max(highest, int(index))
        return 1 + highest

    def size(
        self, config: Mapping[str, Any], heads: int | None, sizes: Mapping[str, Mapping[str, Any]]
    ) -> tuple[str | None, int]:
        """Return the name of the published size with these dimensions (None if there is none) and the number of heads.

        Args:
            config: arguments of the network, without heads.
            heads: number of heads that the caller gives; None takes the heads of the published size.
            sizes: arguments of the published sizes, by name.
        """
        for name, size in sizes.items():
            candidate = {**config, "heads": size["heads"] if heads is None else heads}
            if candidate.items() >= size.items():
                return name, size["heads"]
        if heads is None:
            raise UserError(
                f"{self.where} has a width of {config['dim']} and a depth of {config['depth']}, which is not a "
                "published size: its weights do not determine the attention heads, give them with `heads`"
            )
        return None, heads

    def labels(
        self, table: str, num_classes: int | None, null_labelled: Container[int] | None = None
    ) -> tuple[int, bool]:
        """Return the number of real classes and whether there is a null label.

        Args:
            table: name of the table of label embeddings.
            num_classes: the number that the caller gives; None determines it from the rows of the table.
            null_labelled: numbers of rows whose last row is a null label; None: the last row is always one.
        """
        if table not in self.state:
            if num_classes:
                raise UserError(f"{self.where} is unconditional, it has no classes: leave out `num_classes`")
            return 0, True
        rows, _ = self.shape(table, 2)
        if num_classes is None:
            has_null_label = null_labelled is None or rows in null_labelled
            num_classes = rows - 1 if has_null_label else rows
        if num_classes < 1 or num_classes not in (rows, rows - 1):
            raise UserError(
                f"{self.where} has {rows} rows for labels: `num_classes` is {rows} without a null label, "
                f"or {rows - 1} with one"
            )
        return num_classes, num_classes == rows - 1

    def recorded_alpha_min(self, name: str, given: float | None) -> float | None:
        """Return alpha_min, which is the argument `name` of the training run, or the caller's if it is not recorded."""
        if self.arguments.get(name) is None:
            return given
        alpha_min = as_type(float, self.arguments[name], f"{self.where}: {name}")
        if given not in (None, alpha_min):
            raise UserError(
                f"{self.where} was trained with {name} {alpha_min}, not with alpha_min {given:g}: leave out `alpha_min`"
            )
        return alpha_min

    def alpha_min(self, given: float | None, decayed: bool, usual: str) -> float:
        """Return the alpha_min that the caller gives, otherwise 1.

        Args:
            given: the caller's alpha_min.
            decayed: whether the file has the layout of the decay's authors, which requires it.
            usual: the authors' values, for the message.
        """
        if given is None and decayed and "alphas" not in self.state:
            raise UserError(
                f"{self.where} is a decayed {self.family}, whose weights do not determine alpha_min: give it with "
                f"`alpha_min` ({usual})"
            )
        return 1.0 if given is None else given

    def latents(self, channels: int, vae: str | None) -> LatentSpace | None:
        """Return the latent space of a network of 4 channels, Stable Diffusion's; None for other networks."""
        if channels == STABLE_DIFFUSION.channels:
            return replace(STABLE_DIFFUSION, vae=absolute_name(vae or STABLE_DIFFUSION.vae))
        if vae is not None:
            raise UserError(f"{self.where} makes pixels of {channels} channels, not latents: leave out `vae`")
        return None

    def weights_for(self, net: Network) -> dict[str, Tensor]:
        """Return the weights without alphas; raise a UserError if the weights or recorded alphas do not fit `net`."""
        state = {name: value for name, value in self.state.items() if name != "alphas"}
        if problem := mismatch(net, state, f"official {self.family}"):
            raise self.error(problem)
        if "alphas" in self.state:
            self._check_alphas(net)
        return state

    def _check_alphas(self, net: Network) -> None:
        self.shape("alphas", 1)
        ours = torch.tensor(net.shortcuts.alphas)
        alphas = self.state["alphas"]
        if alphas.shape != ours.shape or (alphas - ours).abs().max() > EPSILON:
            raise UserError(
                f"{self.where} was trained with alphas from {alphas.max():.4g} to {alphas.min():.4g}, not with "
                f"alpha_min {net.config['alpha_min']:g}: give `alpha_min` {alphas.min():.4g} if they fall linearly"
            )
