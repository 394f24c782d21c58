"""The linear layer of a block that narrows, with the faster backward pass in bfloat16 on CPUs."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


class NarrowingLinear(nn.Linear):
    """nn.Linear with fewer outputs than inputs, whose weight's gradient takes less time in bfloat16 on CPUs.

    That is g^T x for the gradient g of the output and the input x. oneDNN reaches half of its rate there (480 of 1000
    GFLOP/s on a core with AMX), and 800 where g, the narrower factor, is transposed in memory first, as here under
    autocast. Below 384 outputs neither is faster. Graphs of torch.compile have products of their own.
    """

    def forward(self, x: Float[Tensor, "*any inputs"]) -> Float[Tensor, "*any outputs"]:
        if self.out_features >= 384 and _trains_in_bfloat16(x, self.weight):
            return _BFloat16Linear.apply(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


def _trains_in_bfloat16(x: Tensor, weight: Tensor) -> bool:
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return autocast and torch.is_grad_enabled() and weight.requires_grad


class _BFloat16Linear(torch.autograd.Function):
    """x W^T + b in bfloat16, as autocast computes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.to(torch.bfloat16).contiguous()
        half = weight.to(torch.bfloat16)
        ctx.save_for_backward(rows, half)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        with torch.autocast("cpu", enabled=False):
            return linear(rows, half, None if bias is None else bias.to(torch.bfloat16))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        rows, weight = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        grad = grad.reshape(-1, grad.shape[-1])
        by_x = (grad @ weight).view(rows.shape).to(x_dtype) if ctx.needs_input_grad[0] else None
        by_weight = (grad.t().contiguous() @ rows.view(-1, rows.shape[-1])).to(weight_dtype)
        return by_x, by_weight, None if bias_dtype is None else grad.sum(0).to(bias_dtype)
