"""The attention of all blocks, by either way, against softmax(q k^T / sqrt(k)) v in float64."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from uvit_decay.nn.layers import attention


def inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 3, 17, 8, generator=generator).to(torch.bfloat16).to(dtype) for _ in range(3)]
    return [tensor.requires_grad_() for tensor in tensors]


def output_and_gradients(function, dtype):
    tensors = inputs(dtype)
    out = function(*tensors)
    out.sin().sum().backward()
    return [out.detach(), *(tensor.grad for tensor in tensors)]


def written_out(q, k, v):
    scores = torch.einsum("bhik,bhjk->bhij", q, k) / math.sqrt(q.shape[-1])
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    return torch.einsum("bhij,bhjk->bhik", weights, v)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float32, 1e-5), (torch.float64, 1e-12)]
)
def test_value_and_gradients_are_those_of_the_definition(dtype, tolerance):
    expected = output_and_gradients(written_out, torch.float64)
    for actual, reference in zip(output_and_gradients(attention, dtype), expected, strict=True):
        assert actual.dtype == dtype
        assert (actual.double() - reference).norm() < tolerance * reference.norm()


@pytest.mark.parametrize(
    ("dtype", "enabled", "frozen"),
    [(torch.bfloat16, False, False), (torch.bfloat16, True, True), (torch.float32, True, False)],
)
def test_where_it_is_the_faster_it_is_the_fused_kernel(dtype, enabled, frozen):
    """Without gradients, of a frozen network, and in single precision."""
    q, k, v = (tensor.detach() if frozen else tensor for tensor in inputs(dtype))
    with torch.set_grad_enabled(enabled):
        assert torch.equal(attention(q, k, v), scaled_dot_product_attention(q, k, v))
