"""The decay through the trunk of the U-ViT: its scales, silent starts, loading."""

import math

import pytest
import torch
from record_ops import recorded
from uvit_reference import SMALL, inputs, loaded, official_forward, small

from uvit_decay.nn.sizes import create_model
from uvit_decay.runtime.errors import UserError

# ---- the function


@pytest.mark.parametrize(
    ("options", "scales"),
    [
        (dict(alpha_min=0.6), dict(alphas=[1 - 0.4 * k / 9 for k in range(10)])),
        (dict(alpha_min=0.6, skip=False), dict(alphas=[1 - 0.4 * k / 9 for k in range(10)])),
        (
            dict(alpha_min=0.6, granularity="block", index="v2", branches="mlp"),
            dict(alphas=[1, 0.92, 1, 0.84, 1, 0.76, 1, 0.68, 1, 0.6]),
        ),
        (dict(schedule="constant"), dict(alphas=[math.sqrt(0.5)] * 10, betas=[math.sqrt(0.5)] * 10)),
    ],
    ids=["linear", "linear-no-skip", "mlp-only-v2-blocks", "constant"],
)
def test_decay_scales_the_shortcuts_in_execution_order_after_the_skip_merge(options, scales):
    net = loaded(num_classes=3, **options).eval()
    arguments = inputs(num_classes=3)
    with torch.no_grad():
        expected = official_forward(net.state_dict(), *arguments, **SMALL, **scales)
        torch.testing.assert_close(net(*arguments), expected, atol=1e-5, rtol=1e-5)


def test_each_shortcut_is_one_addition():
    ops = recorded(loaded(alpha_min=0.7, num_classes=3), inputs(num_classes=3))
    assert ops.count("aten.add.Tensor") == 10 + 1


# ---- initialisation


@pytest.mark.parametrize("init", ["official", "xavier"])
@pytest.mark.parametrize(
    ("alpha_min", "zero_init", "silent"),
    [(1.0, None, False), (0.999, None, True), (0.6, None, True), (0.6, False, False), (1.0, True, True)],
)
def test_branches_start_silent_if_decayed_unless_said_otherwise(alpha_min, zero_init, silent, init):
    net = small(alpha_min=alpha_min, zero_init=zero_init, init=init)
    for block in net.blocks():
        for linear in (block.attn.proj, block.mlp.fc2):
            assert bool(linear.weight.any()) != silent
            assert not linear.bias.any()
        assert block.attn.qkv.weight.any()
        assert block.mlp.fc1.weight.any()
        assert block.skip_linear is None or block.skip_linear.weight.any()


@pytest.mark.parametrize(("options", "silent"), [(dict(), True), (dict(zero_init=False), False)])
def test_a_named_size_starts_alike_with_and_without_decay(options, silent):
    tiny = dict(image_size=4, num_classes=3, dim=16, depth=2, heads=2, **options)
    nets = []
    for alpha_min in (1.0, 0.7):
        torch.manual_seed(0)
        nets.append(create_model("uvit-s/2", alpha_min, **tiny))
    plain, decayed = (net.state_dict() for net in nets)
    assert [key for key in plain if not torch.equal(plain[key], decayed[key])] == ["alphas"]
    assert plain["in_blocks.0.mlp.fc2.weight"].any() != silent


# ---- loading


def test_refused_weights_leave_the_network_as_it_was():
    net = small(alpha_min=0.7)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(UserError):
        net.load_state_dict(loaded(alpha_min=0.8).state_dict())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
