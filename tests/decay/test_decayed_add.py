"""The decayed residual sum: exact, one operation, nothing kept for the backward pass, right in every precision."""

import pytest
import torch
from record_ops import RecordOps

from uvit_decay.decay import decayed_add


def pair(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 5, 8, generator=generator).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("beta", [1.0, 0.5])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(
    ("stream", "branch"), [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2]
)
def test_decayed_add_weights_the_shortcut_with_alpha_and_the_branch_with_beta(alpha, beta, learned, stream, branch):
    """In the precision of the stream, in bfloat16 rounded about once."""
    x, f = pair(stream)[0], pair(branch)[1]
    before = x.clone(), f.clone()
    out = decayed_add(x, f, torch.tensor(alpha) if learned else alpha, beta)
    assert out.dtype == stream
    error = 2**-7 if stream == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out.double(), alpha * x.double() + beta * f.double(), atol=error, rtol=error)
    assert torch.equal(x, before[0])
    assert torch.equal(f, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("learned", [False, True])
def test_alpha_one_is_the_plain_residual_bit_for_bit(dtype, learned):
    x, f = pair(dtype)
    assert torch.equal(decayed_add(x, f, torch.tensor(1.0) if learned else 1.0), x + f)


@pytest.mark.parametrize("alpha", [1.0, 0.7, torch.tensor(0.7)], ids=["one", "decayed", "learned"])
@pytest.mark.parametrize("branch", [torch.float32, torch.bfloat16])
def test_decayed_add_is_one_operation_like_the_plain_add(alpha, branch):
    x, f = pair()[0], pair(branch)[1]
    with RecordOps() as plain:
        x + f
    with RecordOps() as decayed:
        decayed_add(x, f, alpha)
    assert len(decayed.ops) == len(plain.ops) == 1
    if isinstance(alpha, float):
        assert decayed.ops == plain.ops


def test_decayed_add_keeps_nothing_for_the_backward_pass():
    x, f = (tensor.requires_grad_() for tensor in pair())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        decayed_add(x, f, 0.7).sum().backward()
    assert saved == []
    assert torch.equal(x.grad, torch.full_like(x, 0.7))
    assert torch.equal(f.grad, torch.ones_like(f))


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_gradient_of_a_learned_alpha_is_right(beta):
    x, f = (tensor.requires_grad_() for tensor in pair(torch.float64))
    alpha = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *inputs: decayed_add(*inputs, beta), (x, f, alpha))
    upstream = torch.arange(x.numel(), dtype=torch.float64).view_as(x)
    (gradient,) = torch.autograd.grad(decayed_add(x, f, alpha, beta), alpha, upstream)
    torch.testing.assert_close(gradient, (upstream * x).sum())
