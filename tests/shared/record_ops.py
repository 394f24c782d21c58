"""Records of the operations that PyTorch runs, and of operations that would wait for a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import uvit_decay

PACKAGE, ATEN = Path(uvit_decay.__file__).parent, torch.ops.aten
CPU = torch.device("cpu")
SIZED = (ATEN.nonzero.default, ATEN._linalg_eigh.default, ATEN._linalg_svd.default)  # look at numbers on the device


class RecordOps(TorchDispatchMode):
    """Records the names of the aten operations that run in its context."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class Waits(TorchDispatchMode):
    """Records operations that would wait for a GPU, with `meta` as the GPU: "file function: operation", in `found`.

    That is reading a number, copying without non_blocking, which a tensor made of Python's numbers is, too, and
    operations that look at numbers. All numbers of the device, which has none, are 1, and all are not zero.
    """

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
        if any(value.is_meta for value in tensors):
            what, result = self._from_device(func, args, kwargs)
            if what:
                self.found.append(f"{_place()}: {what}")
                return result
        result = func(*args, **kwargs)
        away = isinstance(result, Tensor) and result.is_meta
        small = func in (ATEN.copy_.default, ATEN._to_copy.default)  # other operations take a number as it is
        given = any(value.device == CPU and (value.dim() or small) for value in tensors)
        waits = not (kwargs.get("non_blocking") or (small and True in args[2:]))
        if away and waits and (func is ATEN.lift_fresh.default or given):
            self.found.append(f"{_place()}: copies to the device")
        return result

    def _from_device(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[str, Any]:
        """Return the name of the wait for the device, empty if there is none, and the result of the operation."""
        if func is ATEN._local_scalar_dense.default:
            return "reads a number", torch.ones((), dtype=args[0].dtype).item()
        if func is ATEN._to_copy.default and kwargs.get("device") == CPU:
            return "copies to the host", torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is ATEN.copy_.default and args[0].device == CPU:
            return "copies to the host", args[0].fill_(1)
        if func is ATEN.nonzero.default:
            return "looks at numbers", args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        if func is ATEN.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1]):
            kept = [None if i is None else i.new_empty(i.shape, dtype=torch.int64) for i in args[1]]
            return "looks at numbers", func(args[0], kept)
        return ("looks at numbers", func(*args, **kwargs)) if func in SIZED else ("", None)


def _place() -> str:
    """Return the running file and function of the package, otherwise of Lightning, otherwise nothing."""
    frame, lightning = sys._getframe(2), "elsewhere"
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            return f"{file.relative_to(PACKAGE)} {frame.f_code.co_name}"
        if lightning == "elsewhere" and "lightning" in file.parts:
            lightning = f"lightning {file.name} {frame.f_code.co_name}"
        frame = frame.f_back
    return lightning


def record(net, arguments):
    """Return the names of the operations of net(*arguments), without its backward pass."""
    with RecordOps() as recorder, torch.no_grad():
        net(*arguments)
    return recorder.ops
