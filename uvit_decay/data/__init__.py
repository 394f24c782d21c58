"""Data modules: uint8 images and int64 labels in step-indexed batches."""

from uvit_decay.terminal.program import lazy

MODULES = {
    "Augment": "augment",
    "AugmentedImages": "augmented",
    "CIFAR10": "cifar",
    "CIFAR100": "cifar",
    "Digits": "digits",
    "Batch": "batches",
    "HubDataset": "hub_dataset",
    "ImageData": "datamodule",
    "ImageSet": "batches",
    "InMemory": "batches",
    "Images": "folder",
    "Latents": ".latents.module",
    "SETS": "named",
    "Sizes": "datamodule",
    "class_list": "classes",
    "open_data": "named",
}
__all__ = list(MODULES)
# The first use of a name imports all modules, so that a search for subclasses of ImageData finds them.
__getattr__, __dir__ = lazy(__name__, MODULES, together=True)
