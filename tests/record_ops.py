"""Which operations PyTorch runs."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RecordOps(TorchDispatchMode):
    """Names of the aten operations that run under it."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def recorded(net, arguments):
    """Names of the operations of net(*arguments), without those of a backward pass."""
    with RecordOps() as recorder, torch.no_grad():
        net(*arguments)
    return recorder.ops
