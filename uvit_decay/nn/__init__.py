"""Denoiser networks in pure torch, independent of diffusion and of Lightning."""

from uvit_decay.nn.sit import SiT
from uvit_decay.nn.uvit import UViT

__all__ = ["SiT", "UViT"]
