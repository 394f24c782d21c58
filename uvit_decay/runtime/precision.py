"""The floating-point precision of networks in sampling and evaluation, and whether training in bfloat16 is faster.

float32 is true float32 (no autocast, no TF32, no bfloat16), so that results are reproducible elsewhere; tf32 rounds the
factors of matrix products and convolutions to 10 bits of mantissa, on CUDA GPUs; bf16 is autocast to bfloat16, 7 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch

from uvit_decay.terminal.errors import UserError

Precision = Literal["float32", "tf32", "bf16"]
FLOAT16 = "16-mixed"  # of a trainer: float32 weights, computation in float16, and a scaled loss

# Transformers of at least this width train faster in bfloat16 on CPUs with instructions for it (docs/LOG.md): 1.6 to 3
# times as fast with AMX, and 1.8 to 2 times with AVX512-BF16. Narrower networks gain little or nothing.
BF16_WIDTH = 96
BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")


def check_training_precision(precision: str) -> None:
    """Raise a UserError for a precision of a Lightning trainer with weights in float16, where small steps vanish."""
    if "16" in precision and precision != FLOAT16 and not precision.startswith("bf16"):
        raise UserError(f"`precision` {precision}: train in 32-true, bf16-mixed or {FLOAT16}")


def chosen_precision(precision: Precision | None, device: torch.device) -> Precision:
    """Return `precision`; if it is None, tf32 on CUDA GPUs and float32 elsewhere.

    float32 is several times slower on GPUs; bf16 is never the default because many networks were not trained in it.
    """
    if precision == "tf32" and device.type != "cuda":
        raise UserError(f"precision tf32 needs a CUDA GPU, and this device is {device}: use float32 or bf16")
    if precision is not None:
        return precision
    return "tf32" if device.type == "cuda" else "float32"


def trains_in_bf16(width: int) -> bool:
    """Return whether a transformer of this width trains faster in bf16 on this CPU, by its instructions."""
    return width >= BF16_WIDTH and any(name in BF16_INSTRUCTIONS for name in _list_cpu_features())


def _list_cpu_features() -> list[str]:
    """Return the names of the features of this CPU as Linux lists them; none elsewhere."""
    file = Path("/proc/cpuinfo")
    return file.read_text().split() if file.exists() else []


@contextmanager
def computing(device: torch.device, precision: Precision) -> Iterator[None]:
    """Make networks on `device` compute in this precision within the context, whatever the trainer or user has set.

    The settings are torch's and hold for all threads of the process; they are restored afterwards.
    """
    backends = torch.backends
    tf32 = precision == "tf32"
    on_gpus = (backends.cuda.matmul, backends.cudnn.conv)
    knobs = (*on_gpus, backends.mkldnn.matmul, backends.mkldnn.conv)
    before = [knob.fp32_precision for knob in knobs]
    matmul, cudnn = _read_legacy_settings()
    autocast: AbstractContextManager = nullcontext()
    if torch.amp.is_autocast_available(device.type):  # not on the meta device
        autocast = torch.autocast(device.type, torch.bfloat16, precision == "bf16")
    try:
        if matmul is not None:
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
        if cudnn is not None:
            backends.cudnn.allow_tf32 = tf32
        for knob in knobs:
            knob.fp32_precision = "tf32" if tf32 and knob in on_gpus else "ieee"
        with autocast:
            yield
    finally:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if cudnn is not None:
            backends.cudnn.allow_tf32 = cudnn
        for knob, value in zip(knobs, before, strict=True):
            knob.fp32_precision = value


def _read_legacy_settings() -> tuple[str | None, bool | None]:
    """Return the older forms of these settings (matmul, cuDNN); None where torch refuses to read one as ambiguous.

    They are set together with the new ones, because torch.compile reads them and fails if old and new disagree.
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


def without_autocast(x: torch.Tensor) -> AbstractContextManager:
    """Return a context that disables autocast on the device of `x`, for the first and last layers of a network.

    These layers cost almost nothing, and bfloat16 would lose 0.7 % of the variance of the noise in x_t at t = 1e-3.
    """
    device = x.device.type
    # torch.amp.is_autocast_available would tell devices without autocast, but torch 2.9 does not compile it.
    if device == "meta":
        return nullcontext()
    return torch.autocast(device, enabled=False)
