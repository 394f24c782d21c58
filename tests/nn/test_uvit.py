"""U-ViT against the official function and initialisation.

The tensors of official sizes are in tests/checkpoint/test_official.py.
"""

import math

import pytest
import torch
from refusals import raises_user_error
from torch import nn
from uvit_reference import SMALL, VARIANTS, inputs, official_forward, random_state, small

from uvit_decay.nn.sizes import UVIT_SIZES, create_model


def test_official_sizes_have_the_official_heads():
    heads = {name: size["heads"] for name, size in UVIT_SIZES.items()}
    assert heads == {"uvit-s": 8, "uvit-s-deep": 8, "uvit-m": 12, "uvit-l": 16, "uvit-h": 16}


@pytest.mark.parametrize("name", ["uvit-xxl/2", "sit-xxl/2", "uvit-s", "uvit-s/", "sit-s/two", "/2", ""])
def test_unknown_names_are_user_errors_that_list_the_sizes(name):
    with raises_user_error("uvit-s-deep", "sit-xl"):
        create_model(name)


@pytest.mark.parametrize("alpha_min", [1.0, 0.6])
@pytest.mark.parametrize("variant", VARIANTS)
def test_official_weights_give_the_official_function_with_its_shortcuts_scaled(variant, alpha_min):
    options = SMALL | VARIANTS[variant]
    state, arguments = random_state(**options), inputs(**options)
    net = small(**options, alpha_min=alpha_min).eval()
    net.load_state_dict(state, strict=True)
    with torch.no_grad():
        alphas = [1 - (1 - alpha_min) * k / 9 for k in range(10)]
        expected = official_forward(state, *arguments, **options, alphas=alphas)
        assert expected.std() > 0.3
        torch.testing.assert_close(net(*arguments), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [dict(), dict(num_classes=100, mlp_time_embed=True, qkv_bias=True)])
def test_official_initialisation_has_the_official_statistics(options):
    net = small(dim=256, heads=4, image_size=32, **options)
    normal = {"pos_embed": net.pos_embed}
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear):
            normal[name] = module.weight
            assert module.bias is None or not module.bias.any()
        if isinstance(module, nn.LayerNorm):
            assert torch.equal(module.weight, torch.ones(256))
            assert torch.equal(module.bias, torch.zeros(256))
        if isinstance(module, nn.Conv2d):
            bound = 1 / math.sqrt(module.weight[0].numel())
            assert 0.85 * bound < module.weight.abs().max() <= bound
            assert 0 < module.bias.abs().max() <= bound
    for weight in normal.values():
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert abs(weight.mean().item()) < 4 * 0.02 / math.sqrt(weight.numel())
        assert weight.abs().max() > 0.055
    if "num_classes" in options:
        assert net.label_emb.weight.std().item() == pytest.approx(1.0, rel=0.05)


def test_xavier_initialisation_is_uniform_with_wide_positions_and_labels():
    net = small(dim=64, image_size=32, num_classes=100, init="xavier")
    for module in net.modules():
        if isinstance(module, nn.Linear):
            bound = math.sqrt(6 / sum(module.weight.shape))
            assert 0.95 * bound < module.weight.abs().max() <= bound
            assert module.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
            assert module.bias is None or not module.bias.any()
    assert net.pos_embed.std().item() == pytest.approx(0.2, rel=0.05)
    assert net.label_emb.weight.std().item() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("init", ["official", "xavier"])
@pytest.mark.parametrize(
    ("options", "silent"),
    [
        (dict(), False),
        (dict(alpha_min=0.999), True),
        (dict(alpha_min=0.6, zero_init=False), False),
        (dict(zero_init=True), True),
        (dict(schedule=[1.0] * 8 + [0.9] * 2), True),
        (dict(schedule=[1.0] * 10), False),
        (dict(schedule="constant"), True),
        (dict(schedule="constant-branch"), False),
        (dict(schedule="gain", alpha_min=0.7), True),
    ],
)
def test_branches_start_silent_if_an_alpha_is_below_1_unless_said_otherwise(options, silent, init):
    net = small(init=init, **options)
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
