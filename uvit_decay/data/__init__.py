"""Data modules: uint8 images and int64 labels in step-indexed batches."""

from uvit_decay.runtime.program import lazy

MODULES = {
    "Augment": "augment",
    "AugmentedImages": "augmented",
    "CIFAR10": "cifar",
    "CIFAR100": "cifar",
    "Digits": "digits",
    "ImageData": "datamodule",
    "Images": "folder",
    "Latents": "latents.module",
}
__all__ = list(MODULES)
__getattr__ = lazy(__name__, MODULES)
