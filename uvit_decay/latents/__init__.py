"""Latents of images: encoded once by an autoencoder (`uvit-decay encode`), stored in shards, used for training."""

from uvit_decay.terminal.program import lazy

MODULES = {"Autoencoder": "autoencoder", "LatentSpace": "space", "Latents": "module"}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
