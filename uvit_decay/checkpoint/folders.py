"""Folders that were exported for diffusers, as checkpoints: the weights of their denoiser have a model card, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uvit_decay.autoencoder import LatentSpace

INDEX = "model_index.json"  # of every folder of diffusers
WEIGHTS = "denoiser/diffusion_pytorch_model.safetensors"
AUTOENCODER = "vae"  # folder in it of a checkpoint of latents


def is_folder(path: Path) -> bool:
    """Return whether this is a folder that was exported for diffusers."""
    return (path / INDEX).is_file() and (path / WEIGHTS).is_file()


def weights_file(path: Path) -> Path:
    """Return the file with the weights of a checkpoint: `path`, but of a folder for diffusers that of its denoiser."""
    return path / WEIGHTS if is_folder(path) else path


def own_latents(latents: LatentSpace | None, folder: Path) -> LatentSpace | None:
    """Return the latent space with the autoencoder of the folder, if that has one."""
    vae = folder / AUTOENCODER
    return replace(latents, vae=str(vae.absolute())) if latents and vae.is_dir() else latents
