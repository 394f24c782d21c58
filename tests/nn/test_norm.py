"""RMSNorm instead of LayerNorm, and norms of queries and keys, compared with written-out formulas."""

import math

import pytest
import torch
from mae_reference import SMALL
from networks import DECAYED_SIT, UVIT, each_kind
from reference import random_values
from torch.nn import functional

from uvit_decay.decay.weights import Weighted, weighted
from uvit_decay.nn import MAE, ViT
from uvit_decay.nn.block import AdaLNBlock, Block
from uvit_decay.nn.layers import Attention, LayerFactory

both_types = pytest.mark.parametrize("norm_type", ["layer", "rms"])


def random_weights(module, seed=0):
    """Return the module with weights that all matter."""
    names = {name: value.shape for name, value in module.named_parameters() if name != "alphas"}
    module.load_state_dict(module.state_dict() | random_values(names, seed))
    return module


def normed(h, w, name, kind, eps):
    """Norm by its definition, with the scales and biases that `w` has."""
    if kind == "layer":
        h = h - h.mean(-1, keepdim=True)
    h = h / (h.square().mean(-1, keepdim=True) + eps).sqrt()
    return h * w.get(f"{name}.weight", 1.0) + w.get(f"{name}.bias", 0.0)


def attended(h, w, heads, kind, eps):
    """Attention with normed queries and keys, one head after the other."""
    q, k, v = functional.linear(h, w["attn.qkv.weight"], w.get("attn.qkv.bias")).chunk(3, dim=-1)
    outputs, width = [], h.shape[-1] // heads
    for i in range(0, h.shape[-1], width):
        one = slice(i, i + width)
        scores = normed(q[..., one], w, "attn.q_norm", kind, eps) @ normed(k[..., one], w, "attn.k_norm", kind, eps).mT
        outputs.append((scores / math.sqrt(width)).softmax(-1) @ v[..., one])
    return functional.linear(torch.cat(outputs, -1), w["attn.proj.weight"], w["attn.proj.bias"])


def mlp(h, w, approximate="none"):
    h = functional.gelu(functional.linear(h, w["mlp.fc1.weight"], w["mlp.fc1.bias"]), approximate=approximate)
    return functional.linear(h, w["mlp.fc2.weight"], w["mlp.fc2.bias"])


def tokens(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)


@both_types
def test_a_block_of_u_vit_is_its_formula(norm_type):
    block = random_weights(Block(24, 3, LayerFactory(qk_norm=True, norm_type=norm_type))).double()
    w, x = block.state_dict(), tokens(2, 7, 24)
    assert ("norm1.bias" in w) == ("attn.q_norm.bias" in w) == (norm_type == "layer")
    h = 0.9 * x + attended(normed(x, w, "norm1", norm_type, 1e-5), w, 3, norm_type, 1e-5)
    h = 0.8 * h + mlp(normed(h, w, "norm2", norm_type, 1e-5), w)
    block.connections = tuple(Weighted(weighted([0.9, 0.8]), branch) for branch in (0, 1))
    torch.testing.assert_close(block(x), h, rtol=0, atol=1e-12)


@both_types
def test_a_block_of_sit_is_its_formula(norm_type):
    block = random_weights(AdaLNBlock(24, 3, LayerFactory(qk_norm=True, norm_type=norm_type))).double()
    w, x, c = block.state_dict(), tokens(2, 7, 24), tokens(2, 24)
    assert not [name for name in w if name.startswith("norm")], "shift and scale are those of the condition"
    m = functional.linear(functional.silu(c), w["adaLN_modulation.1.weight"], w["adaLN_modulation.1.bias"])
    shift1, scale1, gate1, shift2, scale2, gate2 = m[:, None].chunk(6, dim=-1)
    f = attended(normed(x, {}, "", norm_type, 1e-6) * (1 + scale1) + shift1, w, 3, norm_type, 1e-6)
    h = 0.9 * x + gate1 * f
    h = 0.8 * h + gate2 * mlp(normed(h, {}, "", norm_type, 1e-6) * (1 + scale2) + shift2, w, "tanh")
    block.connections = tuple(Weighted(weighted([0.9, 0.8]), branch) for branch in (0, 1))
    torch.testing.assert_close(block(x, c), h, rtol=0, atol=1e-12)


def networks(**options):
    """Return a small network of each class."""
    size = {name: value for name, value in SMALL.items() if not name.startswith("decoder")} | dict(num_classes=3)
    uvit, sit = UVIT.small(**options), DECAYED_SIT.small(**options)
    return uvit, sit, ViT(**size, **options), ViT(**size, pool="mean", **options), MAE(**SMALL, **options)


def test_every_norm_is_of_the_type_and_the_rest_is_as_without():
    for plain, rms in zip(networks(), networks(qk_norm=True, norm_type="rms"), strict=True):
        kinds = [type(m) for m in rms.modules() if isinstance(m, torch.nn.LayerNorm | torch.nn.RMSNorm)]
        blocks = sum(isinstance(m, Attention) for m in rms.modules())
        assert set(kinds) == {torch.nn.RMSNorm}
        assert len(kinds) == 2 * blocks + sum(isinstance(m, torch.nn.LayerNorm) for m in plain.modules())
        before, now = plain.state_dict(), rms.state_dict()
        assert {name for name in before.keys() - now.keys() if "norm" not in name} == set()
        added = {f"{norm}_norm.weight" for norm in "qk"}
        assert {name.rpartition("attn.")[2] for name in now.keys() - before.keys()} == added


@each_kind
@both_types
def test_under_autocast_statistics_are_float32_and_attention_is_not(kind, norm_type):
    net = random_weights(kind.small(qk_norm=True, norm_type=norm_type))
    seen = {"norm": set(), "attention": set()}
    for module in net.modules():
        if isinstance(module, Attention):
            for norm in (module.q_norm, module.k_norm):
                norm.register_forward_hook(lambda _, args, out: seen["norm"].update((args[0].dtype, out.dtype)))
            module.register_forward_hook(lambda _, args, out: seen["attention"].add(out.dtype))
    exact = net(*kind.inputs()).detach()
    seen["attention"].clear()
    with torch.autocast("cpu", torch.bfloat16):
        rough = net(*kind.inputs())
    assert seen == {"norm": {torch.float32}, "attention": {torch.bfloat16}}
    rough.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.requires_grad)
    assert float((rough.detach() - exact).norm() / exact.norm()) < 0.03


@both_types
def test_attention_in_bfloat16_alone_stays_in_it(norm_type):
    factory = LayerFactory(norm_type=norm_type, qk_norm=True)
    attention = random_weights(factory.build_attention(24, 3, qkv_bias=True, eps=1e-5))
    x = tokens(2, 7, 24).float()
    rough = attention.bfloat16()(x.bfloat16())
    torch.testing.assert_close(rough.float(), attention.float()(x), rtol=0.05, atol=0.05)
    assert rough.dtype == torch.bfloat16
