"""Official U-ViT files (Bao et al., CVPR 2023; github.com/baofff/U-ViT): what they are, what they tell, the way back.

Such a file is a bare state_dict that describes nothing. Names and shapes tell the sizes; the published configurations
tell the rest (heads, null label, path, sampling) where `Hints` from the caller do not. A decayed U-ViT has the same
names and shapes, so that no file tells alpha_min. Names are those of `UViT` itself, but for the buffer `alphas`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uvit_decay.checkpoint.kinds import PREFIX, UVIT, looks_like
from uvit_decay.diffusion.generate import Sampling
from uvit_decay.diffusion.path import VP, SDDiscrete
from uvit_decay.diffusion.path import Path as NoisePath
from uvit_decay.errors import UserError
from uvit_decay.nn.uvit import UViT
from uvit_decay.nn.zoo import UVIT_SIZES
from uvit_decay.specs import spec

UNTOLD = ("num_classes", "null_label", "time_scale")
DECAY = ("alpha_min", "schedule", "granularity", "index", "branches")
EPSILON = 4e-3  # of alphas; bfloat16's
NULL_LABELLED = (1001, 101, 11)  # rows of a label table that has one more than ImageNet's, a tenth of it, CIFAR-10's
PATHS: dict[str, tuple[NoisePath, float]] = {  # and what the network multiplies t by
    "vp": (VP(), 999.0),
    "sd-discrete": (SDDiscrete(), 1000.0),
}
GUIDANCE = {(4, 32): 1.4, (4, 64): 1.7}  # of latents (channels, image size): ImageNet 256 and 512
STABLE_DIFFUSION = {"vae": "stabilityai/sd-vae-ft-ema", "sha256": "", "scale": 0.18215, "shift": 0.0, "factor": 8}


@dataclass(frozen=True)
class Hints:
    """What a caller knows and the file does not tell; None leaves it to the published configurations.

    Args:
        heads: attention heads.
        num_classes: K real classes; a label table has K rows, or K + 1 with a null label.
        path: a name in `PATHS`.
        alpha_min: of the decayed identity shortcuts; 1 is the official network.
        vae: hub id or folder of the autoencoder whose latents the network makes.
    """

    heads: int | None = None
    num_classes: int | None = None
    path: str | None = None
    alpha_min: float = 1.0
    vae: str | None = None


@dataclass(frozen=True)
class Official:
    """A recognised file: its network (on the meta device), its weights, its published size, how it was trained."""

    net: UViT
    state: dict[str, Tensor]
    size: str | None
    path: str
    latents: dict[str, Any] | None  # None: pixels

    def description(self, origin: str) -> dict[str, Any]:
        """What a checkpoint of this project says of itself, but for its weights and step."""
        noise_path, _ = PATHS[self.path]
        return {
            "net": spec(self.net, self.net.config),
            "path": spec(noise_path, asdict(noise_path)),
            "prediction": "eps",
            "sampling": asdict(_sampling(self.net)),
            "class_names": [str(label) for label in range(self.net.num_classes)],
            "data": f"unknown, imported from {origin}",
            "latents": self.latents,
        }

    def summary(self) -> str:
        """One line for the user, who knows whether it is true."""
        net, config = self.net, self.net.config
        size = f"{self.size or 'uvit'}/{config['patch_size']}"
        count = sum(value.numel() for value in self.state.values())
        kind = "latents" if self.latents else "pixels"
        classes = f"{net.num_classes} classes {'and' if net.null_label else 'without'} a null label"
        return (
            f"{size} ({config['heads']} heads, {count:,} parameters) for {kind} {net.image_size}x{net.image_size}x"
            f"{net.channels}, {classes if net.num_classes else 'unconditional'}, path {self.path}, "
            f"alpha_min {config['alpha_min']:g}"
        )

    def complete_state(self) -> dict[str, Tensor]:
        """The weights as `UViT` saves them, with the alphas that a loader checks."""
        return self.state | {"alphas": torch.tensor(self.net.shortcuts.alphas)}


def recognise(contents: object, hints: Hints, where: Path) -> Official:
    """The network of an official file, from its `contents`; `where` it is from is for messages.

    Raises:
        UserError: another kind of file, names or shapes that are not a U-ViT's, or hints that do not fit.
    """
    kind = looks_like(contents)
    if kind != UVIT:
        raise UserError(f"{where} is no official U-ViT, it looks like {kind}")
    state = {str(name).removeprefix(PREFIX): value for name, value in contents.items()}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise UserError(f"{where} looks like a U-ViT, but its {name} is a {type(value).__name__}, not a tensor")
    config = _sizes(state, where)
    size = _size_name(config, hints.heads)
    heads = UVIT_SIZES[size]["heads"] if size else hints.heads
    if heads is None:
        raise UserError(
            f"{where} has a width of {config['dim']} and a depth of {config['depth']}, which is no published size: "
            "its weights do not tell the attention heads, give them with --heads"
        )
    num_classes, null_label = _labels(state, hints.num_classes, where)
    path = hints.path or ("sd-discrete" if size == "uvit-h" else "vp")
    latents = _latents(config["channels"], hints.vae, where)
    rest = dict(num_classes=num_classes, null_label=null_label, alpha_min=hints.alpha_min, time_scale=PATHS[path][1])
    with torch.device("meta"):  # names and shapes only
        net = UViT(**config, heads=heads, **rest)
    _check_alphas(state.pop("alphas", None), net, where)
    _check_fit(state, net, where)
    return Official(net, state, size, path, latents)


def _sizes(state: dict[str, Tensor], where: Path) -> dict[str, Any]:
    """The arguments of `UViT` that names and shapes tell."""

    dim, channels, patch_size, _ = _shape(state, "patch_embed.proj.weight", 4, where)
    tokens = _shape(state, "pos_embed", 3, where)[1] - (2 if "label_emb.weight" in state else 1)
    side = math.isqrt(max(tokens, 0))
    if side < 1 or side**2 != tokens:
        raise UserError(f"{where} has {tokens} positions for patches, which is no square picture: not supported")
    numbers = [name.split(".")[1] for name in state if name.startswith(("in_blocks.", "out_blocks."))]
    return {
        "image_size": side * patch_size,
        "patch_size": patch_size,
        "channels": channels,
        "dim": dim,
        "depth": 2 * (1 + max((int(number) for number in numbers if number.isdecimal()), default=0)),
        "mlp_ratio": _shape(state, "in_blocks.0.mlp.fc1.weight", 2, where)[0] / dim,
        "skip": "out_blocks.0.skip_linear.weight" in state,
        "conv": "final_layer.weight" in state,
        "mlp_time_embed": "time_embed.0.weight" in state,
        "qkv_bias": "in_blocks.0.attn.qkv.bias" in state,
    }


def _shape(state: dict[str, Tensor], name: str, rank: int, where: Path) -> torch.Size:
    if name not in state:
        raise UserError(f"{where} looks like a U-ViT, but lacks {name}")
    shape = state[name].shape
    if len(shape) != rank or 0 in shape:
        raise UserError(f"{where} looks like a U-ViT, but its {name} has the shape {tuple(shape)}")
    return shape


def _size_name(config: dict[str, Any], heads: int | None) -> str | None:
    """The published size with these dimensions and, where they are given, these heads."""
    for name, size in UVIT_SIZES.items():
        if {**config, "heads": size["heads"] if heads is None else heads}.items() >= size.items():
            return name
    return None


def _labels(state: dict[str, Tensor], num_classes: int | None, where: Path) -> tuple[int, bool]:
    """Real classes, and whether there is a null label."""
    if "label_emb.weight" not in state:
        if num_classes:
            raise UserError(f"{where} is unconditional, it has no classes: leave out --num-classes")
        return 0, True
    rows, _ = _shape(state, "label_emb.weight", 2, where)
    if num_classes is None:
        num_classes = rows - 1 if rows in NULL_LABELLED else rows
    if num_classes < 1 or num_classes not in (rows, rows - 1):
        raise UserError(
            f"{where} has {rows} rows for labels: --num-classes is {rows} without a null label, or {rows - 1} with one"
        )
    return num_classes, num_classes == rows - 1


def _latents(channels: int, vae: str | None, where: Path) -> dict[str, Any] | None:
    """The latent space of a network of 4 channels: every official one is of Stable Diffusion's."""
    if channels != 4:
        if vae is not None:
            raise UserError(f"{where} makes pixels of {channels} channels, not latents: leave out --vae")
        return None
    return STABLE_DIFFUSION | {"channels": channels, "rgb": None} | ({"vae": vae} if vae else {})


def _sampling(net: UViT) -> Sampling:
    """Steps and guidance (s = ours - 1) of the official evaluation, with dpm++ for its singlestep DPM-Solver."""
    if net.channels == 3 and net.image_size in (32, 64) and not net.num_classes:
        return Sampling("euler-maruyama", 1000)
    return Sampling("dpm++", 50, GUIDANCE.get((net.channels, net.image_size), 1.0) if net.null_label else 1.0)


def _check_alphas(alphas: Tensor | None, net: UViT, where: Path) -> None:
    """A bare state_dict of our own network tells its decay: it must be the one that was named."""
    own = torch.tensor(net.shortcuts.alphas)
    if alphas is None or (alphas.shape == own.shape and (alphas - own).abs().max() <= EPSILON):
        return
    raise UserError(
        f"{where} was trained with alphas from {alphas.max():.4g} to {alphas.min():.4g}, not with alpha_min "
        f"{net.config['alpha_min']:g}: give --alpha-min {alphas.min():.4g} if they fall linearly"
    )


def _check_fit(state: dict[str, Tensor], net: UViT, where: Path) -> None:
    wanted = {name: value.shape for name, value in net.state_dict().items() if name != "alphas"}
    for name in wanted | state:
        if name not in wanted:
            raise UserError(f"{where} looks like a U-ViT, but has {name}, which no official U-ViT has")
        if _shape(state, name, len(wanted[name]), where) != wanted[name]:
            shapes = f"{tuple(state[name].shape)}, not {tuple(wanted[name])}"
            raise UserError(f"{where} looks like a U-ViT, but its {name} has the shape {shapes}")


def bare_state(net: nn.Module, state: dict[str, Tensor], where: Path) -> dict[str, Tensor]:
    """The official state_dict of our network `net` with these weights.

    Raises:
        UserError: the official layout cannot express the network.
    """
    if type(net) is not UViT:
        raise UserError(f"{where} holds a {type(net).__name__}, the official layout is for a UViT: export .safetensors")
    if net.shortcuts.learnable or set(net.shortcuts.betas) != {1.0}:
        raise UserError(
            f"{where} has the schedule {net.config['schedule']!r}, whose weights the official layout has no place for: "
            "export .safetensors"
        )
    bare = {name: value.contiguous() for name, value in state.items() if name != "alphas"}
    _check_fit(bare, net, where)
    return bare


def untold(description: dict[str, Any], bare: dict[str, Tensor], where: Path) -> list[str]:
    """What a bare state_dict does not tell of the network that `description` describes: names and values."""
    ours = description["net"]["init_args"]
    guessed = recognise(bare, Hints(heads=ours["heads"]), where)
    theirs = guessed.description("")
    found = [f"heads {ours['heads']}"] if guessed.size is None else []
    names = (*UNTOLD, *DECAY) if ours["alpha_min"] != 1.0 else UNTOLD
    found += [f"{name} {ours[name]}" for name in names if ours[name] != guessed.net.config[name]]
    found += [f"prediction {description['prediction']}"] if description["prediction"] != "eps" else []
    if description["path"] != theirs["path"]:
        found.append(f"path {description['path']['class_path'].rpartition('.')[2]} {description['path']['init_args']}")
    for name in ("vae", "scale", "shift"):
        own = (description.get("latents") or {}).get(name)
        found += [f"{name} {own}"] if own != (theirs["latents"] or {}).get(name) else []
    return found
