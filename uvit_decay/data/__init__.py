"""Data modules: uint8 pictures and int64 labels in step-indexed batches."""

from uvit_decay.data.base import ImageData
from uvit_decay.data.digits import Digits
from uvit_decay.data.images import Images

__all__ = ["Digits", "ImageData", "Images"]
