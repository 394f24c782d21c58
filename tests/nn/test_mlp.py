"""Gated MLPs instead of plain ones: their formula, and networks that have them."""

import pytest
import torch
from mae_reference import SMALL
from networks import DECAYED_SIT, UVIT, each_kind
from refusals import raises_user_error
from torch.nn.functional import linear, silu

from uvit_decay.checkpoint.official.timm import timm_state
from uvit_decay.nn import MAE, ViT
from uvit_decay.nn.layers import LayerFactory, SwiGLU


def test_a_swiglu_is_its_formula_with_the_weights_of_a_plain_mlp():
    factory = LayerFactory(mlp="swiglu", mlp_ratio=3.0)
    mlp, x = factory.build_mlp(24), torch.randn(2, 7, 24)
    w = mlp.state_dict()
    gate, value = linear(x, w["w12.weight"], w["w12.bias"]).split(48, dim=-1)
    torch.testing.assert_close(mlp(x), linear(silu(gate) * value, w["w3.weight"], w["w3.bias"]))
    plain = LayerFactory(mlp_ratio=3.0).build_mlp(24)
    assert sum(m.numel() for m in mlp.parameters() if m.ndim == 2) == sum(
        m.numel() for m in plain.parameters() if m.ndim == 2
    )


@pytest.mark.parametrize("net", [UVIT.small, DECAYED_SIT.small, lambda **options: MAE(**SMALL, **options)])
def test_every_block_of_a_network_has_it(net):
    plain, gated = net(), net(mlp="swiglu")
    kinds = [type(block.mlp) for block in gated.modules() if hasattr(block, "mlp") and hasattr(block, "attn")]
    assert set(kinds) == {SwiGLU}
    changed = {name for name, _ in gated.named_parameters()} ^ {name for name, _ in plain.named_parameters()}
    assert {name.rpartition("mlp.")[2].partition(".")[0] for name in changed} == {"w12", "w3", "fc1", "fc2"}
    assert [end.rpartition(".")[2] for end in gated.branch_ends()] == ["proj", "w3"] * (len(plain.branch_ends()) // 2)


@each_kind
def test_its_branches_start_silent(kind):
    net = kind.small(mlp="swiglu", zero_init=True) if kind is UVIT else kind.small(mlp="swiglu")
    for factor in net.branch_factors():
        weight = net.get_submodule(factor.module).weight.chunk(factor.parts)[factor.part]
        assert not weight.any()


def test_timm_is_told_that_its_layout_has_none(tmp_path):
    net = ViT(8, 2, 3, dim=16, depth=2, heads=2, mlp="swiglu")
    with raises_user_error("mlp", "swiglu", ".safetensors"):
        timm_state(net, net.state_dict(), tmp_path / "x.ckpt")
