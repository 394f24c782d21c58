"""Small denoisers as diffusers folders, and images of sample.py to compare with."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from diffusers.utils import dynamic_modules_utils
from torch import nn

from uvit_decay.checkpoint.detect import KEY
from uvit_decay.checkpoint.io import ModelCard
from uvit_decay.diffusion.noise_path import Linear, NoisePath
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.files.instantiate import Spec
from uvit_decay.files.tensor_files import save_tensors
from uvit_decay.generation.options import SamplingOptions
from uvit_decay.generation.samples import Samples
from uvit_decay.hub.folder import export_folder
from uvit_decay.latents.autoencoder import Autoencoder
from uvit_decay.latents.space import LatentSpace
from uvit_decay.nn import SiT

BUNDLED = ROOT / "checkpoints" / "digits.safetensors"


@pytest.fixture(scope="module", autouse=True)
def own_modules(tmp_path_factory):
    """Give this test file its own cache of the Python files that diffusers copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


def write_denoiser(
    file: Path,
    net: nn.Module,
    path: NoisePath | None = None,
    prediction: str | None = None,
    sampling: Sampling | None = None,
    names: tuple[str, ...] = (),
    latents: LatentSpace | None = None,
) -> Path:
    """Write a checkpoint of a network with random weights; every branch contributes to the output."""
    random = torch.Generator().manual_seed(1)
    for parameter in net.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1, generator=random)
    specs = {"net": Spec.of(type(net), net.config), "path": path and Spec.of(type(path), asdict(path))}
    about = {"data": "none", "step": 3, "weights": "ema", "class_names": names, "latents": latents}
    card = ModelCard(**specs, **about, prediction=prediction, sampling=sampling)
    save_tensors(file, net.state_dict(), {KEY: json.dumps(card.to_dict())})
    return file


def write_latent_sit(file: Path, vae: Path) -> Path:
    """Write a SiT for the latents of the tiny autoencoder; its recommended sampling has fields of all kinds."""
    space = Autoencoder(str(vae)).space
    net = SiT(4, 2, 4, dim=16, depth=2, heads=2, num_classes=2, alpha_min=0.8, wiring="decayed")
    sampling = Sampling("sit-sde", 3, 1.5, guidance_channels=3, guidance_interval=(0.2, 0.9))
    names = ("cat", "dog, domestic dog")
    return write_denoiser(file, net, Linear(), "velocity", sampling, names, space)


def sample_pixels(file: Path, numbers: range, **options) -> np.ndarray:
    """Return the images of sample.py with these options, uint8 (n, h, w, c)."""
    return Samples.from_options(file, SamplingOptions(**options)).images(numbers).permute(0, 2, 3, 1).numpy()


def stack_pictures(pictures: list) -> np.ndarray:
    """Return PIL images as uint8 (n, h, w, c)."""
    arrays = np.stack([np.asarray(picture) for picture in pictures])
    return arrays if arrays.ndim == 4 else arrays[..., None]


def seed_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def export(file: Path, folder: Path, **options) -> Path:
    export_folder(file, folder, **options)
    return folder
