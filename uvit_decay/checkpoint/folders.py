"""Folders that were exported for diffusers, as checkpoints: the weights of their denoiser have a model card, too."""

from __future__ import annotations

from pathlib import Path

INDEX = "model_index.json"  # of every folder of diffusers
WEIGHTS = "denoiser/diffusion_pytorch_model.safetensors"
AUTOENCODER = "vae"  # folder in it of a checkpoint of latents


def is_folder(path: Path) -> bool:
    """Return whether this is a folder that was exported for diffusers."""
    return (path / INDEX).is_file() and (path / WEIGHTS).is_file()


def weights_file(path: Path) -> Path:
    """Return the file with the weights of a checkpoint: `path`, but of a folder for diffusers that of its denoiser."""
    return path / WEIGHTS if is_folder(path) else path
