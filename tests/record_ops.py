"""Which operations PyTorch runs."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordOps(TorchDispatchMode):
    """Names of the aten operations that run under it."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class Waits(TorchDispatchMode):
    """Names of what would make a program wait for a GPU, for which the `meta` device stands: it has no numbers.

    That is reading a number, and copying without non_blocking, which a tensor made of Python's numbers is, too.
    """

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        given = [value.device.type for value in tree_leaves(args) if isinstance(value, torch.Tensor) and value.dim()]
        away = isinstance(result, torch.Tensor) and result.is_meta
        copies = away and (func is torch.ops.aten.lift_fresh.default or "cpu" in given)
        if func is torch.ops.aten._local_scalar_dense.default or copies and not kwargs.get("non_blocking"):
            self.found.append(str(func))
        return result


def recorded(net, arguments):
    """Names of the operations of net(*arguments), without those of a backward pass."""
    with RecordOps() as recorder, torch.no_grad():
        net(*arguments)
    return recorder.ops
