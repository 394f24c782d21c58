"""Latents of images: encoded once (`python -m uvit_decay.data.latents encode`), stored in shards, used for training."""

from uvit_decay.data.latents.module import Latents

__all__ = ["Latents"]
