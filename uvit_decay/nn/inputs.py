"""Checks of the arguments of `forward`: shapes and dtypes at every call, values at the first call of a network.

Shapes and dtypes are compared in Python, so that no check waits for a device or becomes part of a compiled graph. Times
and labels are read once, because on a GPU this waits for the device. They are not read where they cannot be: on the
meta device, while torch traces or compiles, and within transforms of torch.func.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from uvit_decay.runtime.errors import UserError

TIME_ROUNDING = 1e-6


class TakesImages(Protocol):
    """Network with the sizes that its inputs must have, see `uvit_decay.nn.base.ImageNetwork`."""

    image_size: int
    channels: int
    num_classes: int
    null_label: bool
    times_checked: bool
    labels_checked: bool


def check_inputs(net: TakesImages, x: object, t: object, y: object, weight: Tensor) -> None:
    """Raise a UserError unless x, t and y are images, times and labels of a denoiser; `weight` has its dtype."""
    check_images(net, x, weight)
    check_times(net, t, x)
    check_labels(net, y, x)


def check_images(net: TakesImages, x: object, weight: Tensor) -> None:
    """Raise a UserError unless x are images (b, c, h, w) of the network, in the dtype of its first weights."""
    size = net.image_size
    if not isinstance(x, Tensor) or x.ndim != 4 or x.shape[1:] != (net.channels, size, size):
        _refuse(net, "x", f"images (b, {net.channels}, {size}, {size})", x)
    if x.dtype != weight.dtype:
        _refuse(net, "x", f"{weight.dtype}, in about [-1, 1]", x)


def check_images_of_resnet(net: TakesImages, x: object, weight: Tensor) -> None:
    """Raise a UserError as `check_images`; autocast converts the input of a ResNet, unless it is float64."""
    converted = isinstance(x, Tensor) and x.is_floating_point() and torch.float64 not in (x.dtype, weight.dtype)
    check_images(net, x, x if converted else weight)


def check_times(net: TakesImages, t: object, x: Tensor) -> None:
    """Raise a UserError unless t are times (b,) of the images x, float; at the first call also unless in [0, 1]."""
    if not isinstance(t, Tensor) or t.shape != x.shape[:1] or not t.is_floating_point():
        _refuse(net, "t", "times, a float tensor (b,) with one time for each image", t)
    if torch.compiler.is_compiling() or net.times_checked or not _is_readable(t):
        return
    if not bool(((t >= -TIME_ROUNDING) & (t <= 1 + TIME_ROUNDING)).all()):
        _refuse_values(net, "t", "[0, 1], 0 for data and 1 for noise", t)
    net.times_checked = True


def check_labels(net: TakesImages, y: object, x: Tensor) -> None:
    """Raise a UserError unless y are labels (b,) of the images x, integers; at the first call also unless known.

    None, and labels for a network without labels, which ignores them, are not checked.
    """
    if y is None or not net.num_classes:
        return
    if not isinstance(y, Tensor) or y.shape != x.shape[:1] or y.dtype not in (torch.int64, torch.int32):
        _refuse(net, "y", "labels, an int64 tensor (b,) with one class for each image", y)
    if torch.compiler.is_compiling() or net.labels_checked or not _is_readable(y):
        return
    last = net.num_classes - 1 + net.null_label
    if not bool(((y >= 0) & (y <= last)).all()):
        null = f", {last} for no label" if net.null_label else ""
        _refuse_values(net, "y", f"[0, {last}]{null}", y)
    net.labels_checked = True


def check_noise(net: TakesImages, noise: object, x: Tensor, patches: int) -> None:
    """Raise a UserError unless `noise` is a float tensor (b, patches) for the images x."""
    if not isinstance(noise, Tensor) or noise.shape != (x.shape[0], patches) or not noise.is_floating_point():
        _refuse(net, "noise", f"a float tensor (b, {patches}) with one number for each patch", noise)


def _is_readable(x: Tensor) -> bool:
    """Return whether the numbers of a tensor exist and can be read here."""
    if type(x) is not Tensor or x.is_meta or torch.jit.is_tracing():
        return False
    # Transforms of torch.func wrap tensors, and tracers are dispatch modes; torch has no public names for either.
    return not torch._C._functorch.is_functorch_wrapped_tensor(x) and _get_current_dispatch_mode() is None


def _refuse(net: TakesImages, name: str, wanted: str, value: object) -> NoReturn:
    """Raise a UserError for an argument of another shape, dtype or type."""
    given = f"a value of type {type(value).__name__}"
    if isinstance(value, Tensor):
        given = f"{value.dtype} {tuple(value.shape)}"
    raise UserError(f"{type(net).__name__}: {name} must be {wanted}, got {given}")


def _refuse_values(net: TakesImages, name: str, wanted: str, value: Tensor) -> NoReturn:
    """Raise a UserError for values out of range."""
    found = f"{value.min().item():g} to {value.max().item():g}"
    raise UserError(f"{type(net).__name__}: {name} must lie in {wanted}, got {found}")
