"""The floating-point precision of networks in sampling and evaluation, and whether training in bfloat16 is faster.

float32 is true float32 (no autocast, no TF32, no bfloat16), so that results are reproducible elsewhere; tf32 rounds the
factors of matrix products and convolutions to 10 bits of mantissa, on CUDA GPUs; bf16 is autocast to bfloat16, 7 bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from statistics import median
from timeit import timeit
from typing import Literal

import torch

from uvit_decay.runtime.errors import UserError

Precision = Literal["float32", "tf32", "bf16"]

# Transformers of this width and more train faster in bfloat16 on a CPU that multiplies matrices so many times as fast
# in it (docs/LOG.md): 1.6 to 3 times with AMX, 1.8 to 2 with AVX512-BF16, with a ratio of 1.9 (1.5 when busy).
# Without either it is 0.4 to 0.5. Narrower networks gain little or nothing.
BF16_WIDTH, BF16_RATIO = 96, 1.25


def check_training_precision(precision: str) -> None:
    """Raise a UserError for a precision of a Lightning trainer with float16.

    The fused optimizer undoes the scaling of the gradient inside its step, so that clipping and the logged norm would
    see a gradient that is up to 65,536 times too large.
    """
    if "16" in precision and not precision.startswith("bf16"):
        raise UserError(f"--trainer.precision {precision}: train in 32-true or bf16-mixed")


def chosen_precision(precision: Precision | None, device: torch.device) -> Precision:
    """Return `precision`, or if it is None tf32 on CUDA GPUs and float32 elsewhere.

    float32 is several times slower on GPUs; bf16 is never the default because many networks were not trained in it.
    """
    if precision == "tf32" and device.type != "cuda":
        raise UserError(f"precision tf32 is of CUDA GPUs, this device is {device}: use float32 or bf16")
    return precision or ("tf32" if device.type == "cuda" else "float32")


def trains_in_bf16(width: int) -> bool:
    """Return whether a transformer of this width trains faster in bf16 on this CPU, by the time of a product."""
    return width >= BF16_WIDTH and product_ratio() >= BF16_RATIO


@cache
def product_ratio() -> float:
    """Measure how many times as long a product of matrices takes in float32 as in bfloat16 on this CPU: some ms.

    Processor time, medians of products in turn, so that other programs do not decide.
    """
    products = [partial(torch.mm, *torch.ones(2, 256, 256, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    seconds = [[timeit(product, timer=time.process_time, number=1) for product in products] for _ in range(16)]
    single, half = (median(each) for each in zip(*seconds[1:], strict=True))  # the first ones prepare
    return single / half


@contextmanager
def computing(device: torch.device, precision: Precision) -> Iterator[None]:
    """Make networks on `device` compute in this precision within the context, whatever the trainer or user has set.

    The settings are torch's and hold for the whole process, other threads included; they are restored afterwards.
    """
    backends, tf32 = torch.backends, precision == "tf32"
    knobs = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    before = [knob.fp32_precision for knob in knobs]
    matmul, cudnn = _legacy()
    autocasts = torch.amp.is_autocast_available(device.type)  # the meta device does not
    try:
        if matmul is not None:
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
        if cudnn is not None:
            backends.cudnn.allow_tf32 = tf32
        for knob in knobs:
            knob.fp32_precision = "tf32" if tf32 and knob in knobs[:2] else "ieee"
        with torch.autocast(device.type, torch.bfloat16, precision == "bf16") if autocasts else nullcontext():
            yield
    finally:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if cudnn is not None:
            backends.cudnn.allow_tf32 = cudnn
        for knob, value in zip(knobs, before, strict=True):
            knob.fp32_precision = value


def _legacy() -> tuple[str | None, bool | None]:
    """Return the older forms of these settings (matmul, cuDNN); None if torch refuses to read one as ambiguous.

    They are set along with the new ones because torch.compile reads them and fails if old and new disagree.
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
