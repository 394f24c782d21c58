"""Encoders and classifiers as state_dicts of timm's `vision_transformer`, and the Python that builds it there."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from uvit_decay import decay
from uvit_decay.nn.mae import MAE
from uvit_decay.nn.vit import DECAY, ViT
from uvit_decay.terminal.errors import UserError

# Prefixes of an encoder's weights; an MAE's decoder has others.
PARTS = ("cls_token", "pos_embed", "patch_embed.", "blocks.", "norm.", "fc_norm.", "head.")
BASE: dict[str, Any] = {  # arguments of timm's vit_base_patch16_224
    "img_size": 224,
    "patch_size": 16,
    "in_chans": 3,
    "embed_dim": 768,
    "depth": 12,
    "num_heads": 12,
    "mlp_ratio": 4.0,
    "global_pool": "token",
    "qk_norm": False,
    "norm_layer": None,
    "final_norm": True,
}
NORM_LAYERS = {"layer": None, "rms": "rmsnorm"}  # timm's names of norms with the eps of our encoders
SCALES = {  # pixels: (tag of the architecture, words)
    "imagenet": (".mae", "standardised with ImageNet's mean and standard deviation"),
    "unit": ("", "in [-1, 1]"),
}


def timm_state(net: nn.Module, state: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Return the state_dict of timm's vision transformer that computes the encoder or the logits of `net`.

    A batch norm before the head is merged into its linear map. The decoder of an MAE is left out.

    Args:
        net: a network of this project.
        state: its weights.
        where: its file, for error messages.
    """
    if not isinstance(net, MAE | ViT):
        kind = type(net).__name__
        raise UserError(f"{where} holds a {kind}, the layout of timm is for ViT and MAE: leave out `to`")
    if not net.shortcuts.fixed:
        raise UserError(
            f"{where} has the schedule {net.config['schedule']}, which has no place in the layout of timm: "
            "export .safetensors"
        )
    if net.config["mlp"] != "gelu":
        raise UserError(f"{where} has mlp {net.config['mlp']}, which is not in the layout of timm: export .safetensors")
    kept = {name: value.contiguous() for name, value in state.items() if name.startswith(PARTS)}
    if "head.1.weight" not in kept:
        return kept
    norm = net.head[0]
    weight = kept["head.1.weight"] / (kept["head.0.running_var"] + norm.eps).sqrt()
    bias = kept["head.1.bias"] - weight @ kept["head.0.running_mean"]
    encoder = {name: value for name, value in kept.items() if not name.startswith("head.")}
    return encoder | {"head.weight": weight, "head.bias": bias}


def python_lines(net: MAE | ViT, state: Mapping[str, Tensor], target: Path) -> str:
    """Return the lines of Python that build `net` with timm and `decay.attach`, and load `state` from `target`."""
    config = net.config
    tag, words = SCALES[config["pixels"]]
    wanted = {
        "img_size": config["image_size"],
        "patch_size": config["patch_size"],
        "in_chans": config["channels"],
        "embed_dim": config["dim"],
        "depth": config["depth"],
        "num_heads": config["heads"],
        "mlp_ratio": config["mlp_ratio"],
        "global_pool": "avg" if config.get("pool") == "mean" else "token",
        "qk_norm": config["qk_norm"],
        "norm_layer": NORM_LAYERS[config["norm_type"]],
        "final_norm": "norm.weight" in state or "fc_norm.weight" in state,
    }
    changed = {name: value for name, value in wanted.items() if value != BASE[name]}
    options = {"checkpoint_path": str(target), "num_classes": net.num_classes, **changed}
    imports = ["import timm"]
    calls = [f"model = timm.create_model('vit_base_patch16_224{tag}', {_arguments(options)})"]
    if not net.shortcuts.plain():
        parameters = signature(decay.attach).parameters
        settings = {name: config[name] for name in DECAY if config[name] != parameters[name].default}
        imports.append("from uvit_decay import decay")
        calls.append(f"decay.attach(model, {_arguments(settings)})")
    return "\n".join([f"for images {words}, the same function is", *imports, *calls])


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
