"""Data modules: uint8 images and int64 labels in step-indexed batches."""

from uvit_decay.data.augment import Augment
from uvit_decay.data.augmented import AugmentedImages
from uvit_decay.data.cifar import CIFAR10, CIFAR100
from uvit_decay.data.datamodule import ImageData
from uvit_decay.data.digits import Digits
from uvit_decay.data.folder import Images
from uvit_decay.data.latents import Latents

__all__ = ["Augment", "AugmentedImages", "CIFAR10", "CIFAR100", "Digits", "ImageData", "Images", "Latents"]
