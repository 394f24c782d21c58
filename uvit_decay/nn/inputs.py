"""Checks of inputs that would give a wrong output without an error: sizes at every call, times at the first call.

Shapes are compared in Python, so that no check waits for a device or becomes part of a compiled graph. Torch itself
refuses other mistakes: wrong dtypes, and labels that the table of labels lacks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uvit_decay.nn.base import DecayedNet
from uvit_decay.runtime.constants import TIME_ROUNDING
from uvit_decay.terminal.errors import UserError


def check_images(net: DecayedNet, x: Tensor) -> None:
    """Raise a UserError unless x are images (b, c, h, w) of the network's size and channels."""
    size = net.image_size
    if x.ndim != 4 or x.shape[1:] != (net.channels, size, size):
        wanted = f"images (b, {net.channels}, {size}, {size})"
        raise UserError(f"{type(net).__name__}: x must be {wanted}, got {tuple(x.shape)}")


def check_times(net: DecayedNet, t: Tensor) -> None:
    """Raise a UserError unless the times t lie in [0, 1]; only at the first call, because on a GPU reading them waits.

    Times are not read where they cannot be: while torch traces or compiles, on the meta device, and in torch.func.vmap.
    """
    # Compiling is asked first: a graph that has read `times_checked` is compiled again when it changes.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or t.is_meta or net.times_checked:
        return
    try:
        within = bool(((t >= -TIME_ROUNDING) & (t <= 1 + TIME_ROUNDING)).all())
    except RuntimeError:  # a fake tensor, or a transform of torch.func
        return
    if not within:
        found = f"{t.min().item():g} to {t.max().item():g}"
        raise UserError(f"{type(net).__name__}: t must lie in [0, 1], 0 for data and 1 for noise, got {found}")
    net.times_checked = True
