"""Networks in pure torch, independent of diffusion and of Lightning: denoisers, encoders and masked autoencoders."""

from uvit_decay.nn.base import ImageNetwork, check_attributes
from uvit_decay.nn.embed import timestep_embedding
from uvit_decay.nn.intermediates import HasIntermediates, Layer, pooled, states_of
from uvit_decay.nn.mae import MAE
from uvit_decay.nn.resnet import ResNet
from uvit_decay.nn.sit import SiT
from uvit_decay.nn.sizes import create_model
from uvit_decay.nn.uvit import UViT
from uvit_decay.nn.vit import ViT

__all__ = [
    "MAE",
    "HasIntermediates",
    "ImageNetwork",
    "Layer",
    "ResNet",
    "SiT",
    "UViT",
    "ViT",
    "check_attributes",
    "create_model",
    "pooled",
    "states_of",
    "timestep_embedding",
]
