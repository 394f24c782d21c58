"""README.md of a folder for diffusers: what the model is, how to use it, its licence, and metadata for the Hub."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import ModelCard as Readme
from huggingface_hub import ModelCardData

from uvit_decay import __version__
from uvit_decay.checkpoint import Checkpoint
from uvit_decay.checkpoint.official.common import IMPORTED

README = "README.md"
TEMPLATE = Path(__file__).with_name("card.md.j2")
TASK = "unconditional-image-generation"  # the only one of the Hub for images without text, also by class
HUB_DATA = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}  # our names of sets: those of the Hub


def model_card(checkpoint: Checkpoint, name: str, license: str | None = None) -> Readme:
    """Return the README.md of a folder with this denoiser, under this name; `license` is that of its weights."""
    net, data = checkpoint.net, HUB_DATA.get(checkpoint.card.data)
    kind = "class-conditional" if net.num_classes else "unconditional"
    metadata = ModelCardData(
        library_name="diffusers",
        pipeline_tag=TASK,
        license=license or "unknown",
        tags=["uvit_decay", "decayed-identity-shortcuts", type(net).__name__.lower(), kind],
        datasets=data and [data],
    )
    return Readme.from_template(
        metadata,
        template_path=str(TEMPLATE),
        name=plain(name),
        place=repr(name),
        sentence=_sentence(checkpoint, kind),
        data=plain(checkpoint.card.data),
        weights=f"{checkpoint.card.weights} weights after {checkpoint.card.step:,} optimizer steps",
        call=f"class_labels={list(range(min(net.num_classes, 4)))}" if net.num_classes else "num_images=4",
        classes=net.num_classes,
        licence=_licence(checkpoint, license),
        version=__version__,
    )


def plain(text: str) -> str:
    """Return text of one line without marks of Markdown; names may come from any file."""
    return re.sub(r"([|<>`*\[\]\\])", r"\\\1", " ".join(text.split()))


def _sentence(checkpoint: Checkpoint, kind: str) -> str:
    net = checkpoint.net
    what = f"latents of {net.channels} channels" if checkpoint.card.latents else "pixels"
    parameters = sum(parameter.numel() for parameter in net.parameters())
    return (
        f"A {kind} {type(net).__name__} of {parameters:,} parameters that makes {what}, "
        f"{net.image_size}x{net.image_size}, with [decayed identity shortcuts](https://arxiv.org/abs/2404.10947): "
        f"schedule {plain(str(net.config['schedule']))[:60]}, alpha from {net.shortcuts.alphas[0]:.4g} to "
        f"{net.shortcuts.alphas[-1]:.4g}."
    )


def _licence(checkpoint: Checkpoint, license: str | None) -> str:
    if license is not None:
        return f"The weights: {license}. The code of uvit_decay: MIT."
    imported = (
        "that of their publisher, since they were imported" if checkpoint.card.data.startswith(IMPORTED) else "unknown"
    )
    return (
        f"The weights: {imported}. Name it here and in the metadata (`--license` of the export) before you share them, "
        "and mind that of the training data. The code of uvit_decay: MIT."
    )
