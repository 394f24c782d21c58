"""The linear layer that narrows, in each dtype and mode, against torch's and against the definition in float64."""

import pytest
import torch
from torch.nn.functional import linear

from uvit_decay.nn.linear import NarrowingLinear


def layer_and_input(inputs=512, outputs=384, **options):
    torch.manual_seed(0)
    return NarrowingLinear(inputs, outputs, **options), torch.randn(3, 7, inputs, requires_grad=True)


def output_and_gradients(layer, x, bfloat16, function=None):
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        out = layer(x) if function is None else function(x, layer.weight, layer.bias)
    tensors = [value for value in (x, layer.weight, layer.bias) if value is not None and value.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.float().sin().sum(), tensors)]


@pytest.mark.parametrize("options", [dict(), dict(bias=False), dict(outputs=64)])
@pytest.mark.parametrize("bfloat16", [False, True])
def test_output_and_gradients_are_those_of_torch(options, bfloat16):
    layer, x = layer_and_input(**options)
    actual, expected = (output_and_gradients(layer, x, bfloat16, function) for function in (None, linear))
    assert torch.equal(actual[0], expected[0])
    for value, reference in zip(actual, expected, strict=True):
        assert value.dtype == reference.dtype
        assert value.stride() == reference.stride()
        assert (value - reference).norm() < (0.003 if bfloat16 else 1e-6) * reference.norm()


def test_gradients_in_bfloat16_are_near_those_of_the_definition():
    layer, x = layer_and_input()
    actual = output_and_gradients(layer, x, True)
    wide, weight = x.detach().double().flatten(0, 1), layer.weight.detach().double()
    grad = (wide @ weight.t() + layer.bias.detach().double()).cos()
    for value, reference in zip(actual[1:], (grad @ weight, grad.t() @ wide, grad.sum(0)), strict=True):
        assert (value.double().view(reference.shape) - reference).norm() < 0.01 * reference.norm()


@pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient(frozen):
    layer, x = layer_and_input()
    {"input": x, "weight": layer.weight, "bias": layer.bias}[frozen].requires_grad_(False)
    actual, expected = (output_and_gradients(layer, x, True, function) for function in (None, linear))
    for value, reference in zip(actual, expected, strict=True):
        assert (value - reference).norm() < 0.003 * reference.norm()
