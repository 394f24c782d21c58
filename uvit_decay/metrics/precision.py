"""Float32 that is float32: no autocast, no TF32, no bfloat16 inside, so that a number can be had again elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Products and convolutions of float32 tensors in float32, whatever trainer and user have set; put back after.

    The settings are torch's, for the whole process: another thread that computes meanwhile has them too.
    """
    backends = torch.backends
    knobs = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    before = [knob.fp32_precision for knob in knobs]
    matmul, cudnn = _legacy()
    try:
        if matmul is not None:
            torch.set_float32_matmul_precision("highest")
        if cudnn is not None:
            backends.cudnn.allow_tf32 = False
        for knob in knobs:
            knob.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if cudnn is not None:
            backends.cudnn.allow_tf32 = cudnn
        for knob, value in zip(knobs, before, strict=True):
            knob.fp32_precision = value


def _legacy() -> tuple[str | None, bool | None]:
    """The older names of these settings, None where they no longer say it all: torch then refuses to read them.

    They have to follow because torch.compile reads them and stops where old and new disagree.
    """
    try:
        matmul = torch.get_float32_matmul_precision()
    except RuntimeError:
        matmul = None
    try:
        cudnn = torch.backends.cudnn.allow_tf32
    except RuntimeError:
        cudnn = None
    return matmul, cudnn
