"""Networks: pure torch, tensors in, tensors out. They know neither diffusion nor Lightning."""

from uvit_decay.nn.sit import SiT
from uvit_decay.nn.uvit import UViT

__all__ = ["SiT", "UViT"]
