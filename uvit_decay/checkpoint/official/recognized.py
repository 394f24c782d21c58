"""Shared parts of the importers of official files: the caller's hints, bare state_dicts, recognised networks."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uvit_decay.checkpoint.detect import PREFIX
from uvit_decay.checkpoint.io import misfit
from uvit_decay.diffusion.noise_path import GVP, VP, Linear, NoisePath, SDDiscrete
from uvit_decay.diffusion.prediction import Prediction
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.nn.sit import SiT, Wiring
from uvit_decay.nn.uvit import UViT
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.instantiate import spec

EPSILON = 4e-3  # tolerance for alphas: the precision of bfloat16
PATHS: dict[str, NoisePath] = {"linear": Linear(), "gvp": GVP(), "vp": VP(), "sd-discrete": SDDiscrete()}
STABLE_DIFFUSION = {"vae": "stabilityai/sd-vae-ft-ema", "sha256": "", "scale": 0.18215, "shift": 0.0, "factor": 8}


@dataclass(frozen=True)
class ImportOptions:
    """Import options for what a file may not determine; None defers to the file and the published configurations.

    Args:
        heads: number of attention heads.
        num_classes: number K of real classes; a label table has K rows, or K + 1 with a null label.
        path: noise path, a name in `PATHS`.
        prediction: quantity that the network was trained to predict.
        alpha_min: smallest alpha of the decayed identity shortcuts; 1 is the official network.
        wiring: wiring of a SiT; `decayed` adds zero-weight long skips to an official one, the same function.
        vae: hub id or folder of the autoencoder whose latents the network generates.
    """

    heads: int | None = None
    num_classes: int | None = None
    path: str | None = None
    prediction: Prediction | None = None
    alpha_min: float | None = None
    wiring: Wiring | None = None
    vae: str | None = None


@dataclass(frozen=True)
class RecognizedModel:
    """A recognised official file: network (on the meta device), weights, published size and training settings."""

    net: UViT | SiT
    state: dict[str, Tensor]
    size: str | None
    path: str
    prediction: Prediction
    sampling: Sampling
    latents: dict[str, Any] | None  # None for a network of pixels

    def description(self, origin: str) -> dict[str, Any]:
        """Return the description that a checkpoint of this project stores, without `weights` and `step`."""
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
        """Return a one-line summary for the user to verify."""
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
        """Return the weights as this project's networks save them, with the alphas that a loader checks."""
        return self.state | {"alphas": torch.tensor(self.net.shortcuts.alphas)}


@dataclass(frozen=True)
class OfficialState:
    """A bare state_dict that resembles those of `family`; `where`, the path of its file, is for error messages."""

    state: Mapping[str, Tensor]
    family: str
    where: Path

    @classmethod
    def of(cls, contents: Mapping[Any, Any], family: str, where: Path) -> OfficialState:
        """Build it from the entries of a file, with DataParallel's prefix removed from their names.

        Raises:
            UserError: an entry is not a tensor.
        """
        bare = cls({str(name).removeprefix(PREFIX): value for name, value in contents.items()}, family, where)
        for name, value in bare.state.items():
            if not isinstance(value, Tensor):
                raise bare.misfit(f"its {name} is a {type(value).__name__}, not a tensor")
        return bare

    def misfit(self, what: str) -> UserError:
        """Return the error for a state_dict that does not fit its family, with the mismatch `what`."""
        return UserError(f"{self.where} looks like a {self.family}, but {what}")

    def shape(self, name: str, rank: int) -> torch.Size:
        """Return the shape of a required entry.

        Raises:
            UserError: the entry is missing, empty, or of another rank.
        """
        if name not in self.state:
            raise self.misfit(f"lacks {name}")
        shape = self.state[name].shape
        if len(shape) != rank or 0 in shape:
            raise self.misfit(f"its {name} has the shape {tuple(shape)}")
        return shape

    def image_layout(self, patches: str, num_prefix_tokens: int) -> dict[str, int]:
        """Return the image and patch arguments of the network.

        Args:
            patches: name of the convolution that embeds patches as tokens.
            num_prefix_tokens: number of prefix tokens, which have positions too.

        Raises:
            UserError: no such entries, or positions of patches that form no square.
        """
        dim, channels, patch_size, _ = self.shape(f"{patches}.weight", 4)
        tokens = self.shape("pos_embed", 3)[1] - num_prefix_tokens
        side = math.isqrt(max(tokens, 0))
        if side < 1 or side**2 != tokens:
            raise UserError(f"{self.where} has {tokens} positions for patches, which is no square image: not supported")
        return {"image_size": side * patch_size, "patch_size": patch_size, "channels": channels, "dim": dim}

    def blocks(self, *lists: str) -> int:
        """Return the number of blocks in the longest of these module lists, from its highest index; at least 1.

        Indices not below the number of all entries are ignored here: `fitting` reports such entries as unknown.
        """
        numbers = [name.split(".")[1] for name in self.state if name.split(".")[0] in lists and "." in name]
        known = {str(number) for number in range(len(self.state))}
        return 1 + max((int(number) for number in known.intersection(numbers)), default=0)

    def size(
        self, config: Mapping[str, Any], heads: int | None, sizes: Mapping[str, Mapping[str, Any]]
    ) -> tuple[str | None, int]:
        """Return the published size with these dimensions and `heads` (None if there is none), and the number of heads.

        Raises:
            UserError: no published size fits, and `heads` is None.
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
        """Return the number of real classes and whether there is a null label.

        Without `num_classes`, the last row of `table` is taken for a null label: always, or if `null_labelled` is given
        only when it contains the number of rows.

        Raises:
            UserError: `num_classes` does not fit the table, or there is no table.
        """
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
        """Return the latent space of a network of 4 channels (Stable Diffusion's in all official files), else None.

        Raises:
            UserError: `vae` is given for a network of pixels.
        """
        if channels != 4:
            if vae is not None:
                raise UserError(f"{self.where} makes pixels of {channels} channels, not latents: leave out --vae")
            return None
        return STABLE_DIFFUSION | {"channels": channels, "rgb": None} | ({"vae": vae} if vae else {})

    def fitting(self, net: UViT | SiT) -> dict[str, Tensor]:
        """Return the weights for `net`, without alphas.

        Raises:
            UserError: names, shapes or dtype kinds are not the network's, or recorded alphas differ from its alphas.
        """
        state = {name: value for name, value in self.state.items() if name != "alphas"}
        problem = misfit(net, state, f"official {self.family}")
        if problem:
            raise self.misfit(problem)
        self._check_alphas(net)
        return state

    def _check_alphas(self, net: UViT | SiT) -> None:
        """Raise a UserError if the state_dict records alphas, as this project's do, that are not those of `net`."""
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
