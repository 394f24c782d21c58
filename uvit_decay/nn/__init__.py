"""Networks in pure torch, independent of diffusion and of Lightning: denoisers, encoders and masked autoencoders."""

from uvit_decay.nn.mae import MAE
from uvit_decay.nn.resnet import ResNet
from uvit_decay.nn.sit import SiT
from uvit_decay.nn.uvit import UViT
from uvit_decay.nn.vit import ViT

__all__ = ["MAE", "ResNet", "SiT", "UViT", "ViT"]
