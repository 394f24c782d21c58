"""What the families of official files share: the caller's hints, a bare state_dict, the network found in it."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uvit_decay.checkpoint.files import misfit
from uvit_decay.checkpoint.kinds import PREFIX
from uvit_decay.diffusion.generate import Sampling
from uvit_decay.diffusion.loss import Prediction
from uvit_decay.diffusion.path import GVP, VP, Linear, SDDiscrete
from uvit_decay.diffusion.path import Path as NoisePath
from uvit_decay.errors import UserError
from uvit_decay.nn.sit import SiT, Wiring
from uvit_decay.nn.uvit import UViT
from uvit_decay.specs import spec

EPSILON = 4e-3  # of alphas; bfloat16's
PATHS: dict[str, NoisePath] = {"linear": Linear(), "gvp": GVP(), "vp": VP(), "sd-discrete": SDDiscrete()}
STABLE_DIFFUSION = {"vae": "stabilityai/sd-vae-ft-ema", "sha256": "", "scale": 0.18215, "shift": 0.0, "factor": 8}


@dataclass(frozen=True)
class Hints:
    """What a caller knows and the file does not tell; None leaves it to the file and the published configurations.

    Args:
        heads: attention heads.
        num_classes: K real classes; a label table has K rows, or K + 1 with a null label.
        path: a name in `PATHS`.
        prediction: what the network was trained to say.
        alpha_min: of the decayed identity shortcuts; 1 is the official network.
        wiring: of a SiT; `decayed` adds silent long skips to an official one, the same function.
        vae: hub id or folder of the autoencoder whose latents the network makes.
    """

    heads: int | None = None
    num_classes: int | None = None
    path: str | None = None
    prediction: Prediction | None = None
    alpha_min: float | None = None
    wiring: Wiring | None = None
    vae: str | None = None


@dataclass(frozen=True)
class Official:
    """A recognised file: its network (on the meta device), its weights, its published size, how it was trained."""

    net: UViT | SiT
    state: dict[str, Tensor]
    size: str | None
    path: str
    prediction: Prediction
    sampling: Sampling
    latents: dict[str, Any] | None  # None: pixels

    def description(self, origin: str) -> dict[str, Any]:
        """What a checkpoint of this project says of itself, but for its weights and step."""
        return {
            "net": spec(type(self.net), self.net.config),
            "path": spec(type(PATHS[self.path]), asdict(PATHS[self.path])),
            "prediction": self.prediction,
            "sampling": asdict(self.sampling),
            "class_names": [str(label) for label in range(self.net.num_classes)],
            "data": f"unknown, imported from {origin}",
            "latents": self.latents,
        }

    def summary(self) -> str:
        """One line for the user, who knows whether it is true."""
        net, config = self.net, self.net.config
        size = f"{self.size or type(net).__name__.lower()}/{config['patch_size']}"
        count = sum(value.numel() for value in self.state.values())
        kind = "latents" if self.latents else "pixels"
        classes = f"{net.num_classes} classes {'and' if net.null_label else 'without'} a null label"
        return (
            f"{size} ({config['heads']} heads, {count:,} parameters), {self.prediction} for {kind} "
            f"{net.image_size}x{net.image_size}x{net.channels}, {classes if net.num_classes else 'unconditional'}, "
            f"path {self.path}, alpha_min {config['alpha_min']:g}"
            f"{', decayed wiring' if config.get('wiring') == 'decayed' else ''}"
        )

    def complete_state(self) -> dict[str, Tensor]:
        """The weights as our networks save them, with the alphas that a loader checks."""
        return self.state | {"alphas": torch.tensor(self.net.shortcuts.alphas)}


@dataclass(frozen=True)
class Bare:
    """A bare state_dict that looks like one of the `family`; `where` it is from is for messages."""

    state: Mapping[str, Tensor]
    family: str
    where: Path

    @classmethod
    def of(cls, contents: Mapping[Any, Any], family: str, where: Path) -> Bare:
        bare = cls({str(name).removeprefix(PREFIX): value for name, value in contents.items()}, family, where)
        for name, value in bare.state.items():
            if not isinstance(value, Tensor):
                raise bare.misfit(f"its {name} is a {type(value).__name__}, not a tensor")
        return bare

    def misfit(self, what: str) -> UserError:
        return UserError(f"{self.where} looks like a {self.family}, but {what}")

    def shape(self, name: str, rank: int) -> torch.Size:
        """The shape of an entry that must be there.

        Raises:
            UserError: it is not, or has no values or another rank.
        """
        if name not in self.state:
            raise self.misfit(f"lacks {name}")
        shape = self.state[name].shape
        if len(shape) != rank or 0 in shape:
            raise self.misfit(f"its {name} has the shape {tuple(shape)}")
        return shape

    def picture(self, patches: str, extras: int) -> dict[str, int]:
        """The picture's arguments of a network whose convolution `patches` makes tokens, besides `extras` others."""
        dim, channels, patch_size, _ = self.shape(f"{patches}.weight", 4)
        tokens = self.shape("pos_embed", 3)[1] - extras
        side = math.isqrt(max(tokens, 0))
        if side < 1 or side**2 != tokens:
            raise UserError(
                f"{self.where} has {tokens} positions for patches, which is no square picture: not supported"
            )
        return {"image_size": side * patch_size, "patch_size": patch_size, "channels": channels, "dim": dim}

    def blocks(self, *lists: str) -> int:
        """How many blocks the longest of these lists has, from its highest number; at least 1, at most all entries.

        A higher number is one that `fitting` finds to be of no block.
        """
        numbers = [name.split(".")[1] for name in self.state if name.split(".")[0] in lists and "." in name]
        known = {str(number) for number in range(len(self.state))}
        return 1 + max((int(number) for number in known.intersection(numbers)), default=0)

    def size(
        self, config: Mapping[str, Any], heads: int | None, sizes: Mapping[str, Mapping[str, Any]]
    ) -> tuple[str | None, int]:
        """The published size with these dimensions and, where they are given, these heads; and the heads.

        Raises:
            UserError: no published size, and no heads given.
        """
        for name, size in sizes.items():
            if {**config, "heads": size["heads"] if heads is None else heads}.items() >= size.items():
                return name, size["heads"]
        if heads is None:
            raise UserError(
                f"{self.where} has a width of {config['dim']} and a depth of {config['depth']}, which is no published "
                "size: its weights do not tell the attention heads, give them with --heads"
            )
        return None, heads

    def labels(
        self, table: str, num_classes: int | None, null_labelled: Container[int] | None = None
    ) -> tuple[int, bool]:
        """Real classes, and whether there is a null label; the guess is yes, or for these numbers of rows only."""
        if table not in self.state:
            if num_classes:
                raise UserError(f"{self.where} is unconditional, it has no classes: leave out --num-classes")
            return 0, True
        rows, _ = self.shape(table, 2)
        if num_classes is None:
            num_classes = rows - 1 if null_labelled is None or rows in null_labelled else rows
        if num_classes < 1 or num_classes not in (rows, rows - 1):
            raise UserError(
                f"{self.where} has {rows} rows for labels: --num-classes is {rows} without a null label, "
                f"or {rows - 1} with one"
            )
        return num_classes, num_classes == rows - 1

    def latents(self, channels: int, vae: str | None) -> dict[str, Any] | None:
        """The latent space of a network of 4 channels: every official one is of Stable Diffusion's."""
        if channels != 4:
            if vae is not None:
                raise UserError(f"{self.where} makes pixels of {channels} channels, not latents: leave out --vae")
            return None
        return STABLE_DIFFUSION | {"channels": channels, "rgb": None} | ({"vae": vae} if vae else {})

    def fitting(self, net: UViT | SiT) -> dict[str, Tensor]:
        """The weights for `net`, without alphas.

        Raises:
            UserError: names, shapes or kinds of number are not the network's, or recorded alphas are others.
        """
        state = {name: value for name, value in self.state.items() if name != "alphas"}
        problem = misfit(net, state, f"official {self.family}")
        if problem:
            raise self.misfit(problem)
        self._check_alphas(net)
        return state

    def _check_alphas(self, net: UViT | SiT) -> None:
        """A bare state_dict of our own network tells its decay: it must be the one that was named."""
        if "alphas" not in self.state:
            return
        self.shape("alphas", 1)
        own, alphas = torch.tensor(net.shortcuts.alphas), self.state["alphas"]
        if not alphas.is_floating_point():
            raise self.misfit(f"its alphas are of {alphas.dtype}")
        if alphas.shape == own.shape and (alphas - own).abs().max() <= EPSILON:
            return
        raise UserError(
            f"{self.where} was trained with alphas from {alphas.max():.4g} to {alphas.min():.4g}, not with alpha_min "
            f"{net.config['alpha_min']:g}: give --alpha-min {alphas.min():.4g} if they fall linearly"
        )
