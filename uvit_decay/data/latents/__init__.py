"""Latents of pictures: encoded once (`python -m uvit_decay.data.latents encode`), stored in shards, trained on."""

from uvit_decay.data.latents.module import Latents

__all__ = ["Latents"]
