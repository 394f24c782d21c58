"""U-ViT against the official sizes, key layout, function and initialisation."""

import math

import pytest
import torch
from torch import nn
from uvit_reference import SMALL, VARIANTS, inputs, official_forward, official_shapes, random_state, small

from uvit_decay.nn.intermediates import HasIntermediates
from uvit_decay.nn.sizes import create_model
from uvit_decay.runtime.errors import UserError

PIXELS_32 = dict(image_size=32, channels=3)
LATENTS_32 = dict(image_size=32, channels=4)
PARAMETERS = [  # more in tests/checkpoint/test_official.py
    ("uvit-s/2", PIXELS_32, 44_255_328),
    ("uvit-h/2", dict(num_classes=1000, **LATENTS_32), 500_832_016),
    ("uvit-m/4", LATENTS_32, 130_048_724),
]


# ---- sizes and layout


@pytest.mark.parametrize(("name", "options", "count"), PARAMETERS)
def test_parameter_counts_are_the_official_ones_and_decay_adds_none(name, options, count):
    with torch.device("meta"):
        nets = [create_model(name, alpha_min=alpha_min, **options) for alpha_min in (1.0, 0.7)]
    assert [sum(parameter.numel() for parameter in net.parameters()) for net in nets] == [count, count]


@pytest.mark.parametrize(
    ("name", "options", "tensors"),
    [("uvit-s/2", PIXELS_32, 164), ("uvit-h/2", dict(num_classes=1000, **LATENTS_32), 355)],
)
def test_official_sizes_have_the_official_tensors_and_the_alphas(name, options, tensors):
    with torch.device("meta"):
        net = create_model(name, **options)
    shapes = {key: tuple(value.shape) for key, value in net.state_dict().items()}
    assert shapes.pop("alphas") == (2 * (net.config["depth"] + 1),)
    assert shapes == official_shapes(**net.config)
    assert len(shapes) == tensors


@pytest.mark.parametrize("name", ["uvit-xxl/2", "sit-xxl/2", "uvit-s", "uvit-s/", "sit-s/two", "/2", ""])
def test_unknown_names_are_user_errors_that_list_the_sizes(name):
    with pytest.raises(UserError, match=r"uvit-s-deep.*sit-xl"):
        create_model(name)


# ---- taps


def test_stages_are_the_embeddings_and_every_block_in_execution_order():
    net = small(depth=4)
    names = ["embeddings", "in_blocks.0", "in_blocks.1", "mid_block", "out_blocks.0", "out_blocks.1"]
    assert [stage.name for stage in net.layers] == names
    assert [stage.kind for stage in net.layers] == ["embeddings", *["encoder"] * 2, "middle", *["decoder"] * 2]
    assert len(net.blocks()) == 5
    assert isinstance(net, HasIntermediates)


# ---- loading


def test_loading_does_not_change_the_callers_dict():
    state = random_state(**SMALL)
    before = dict(state)
    small(alpha_min=0.7).load_state_dict(state)
    assert state.keys() == before.keys()
    assert all(state[key] is before[key] for key in before)


@pytest.mark.parametrize("missing", ["pos_embed", "mid_block.mlp.fc2.bias", "out_blocks.1.skip_linear.weight"])
def test_strict_loading_still_refuses_incomplete_files(missing):
    state = random_state(**SMALL)
    del state[missing]
    with pytest.raises(RuntimeError, match=missing):
        small().load_state_dict(state, strict=True)


# ---- the official function


@pytest.mark.parametrize("variant", VARIANTS)
def test_official_weights_give_the_official_function_at_alpha_min_one(variant):
    options = SMALL | VARIANTS[variant]
    state, arguments = random_state(**options), inputs(**options)
    net = small(**options, alpha_min=1.0).eval()
    net.load_state_dict(state, strict=True)
    with torch.no_grad():
        expected = official_forward(state, *arguments, **options)
        assert expected.std() > 0.3
        torch.testing.assert_close(net(*arguments), expected, atol=1e-5, rtol=1e-5)


def test_official_weights_give_the_official_function_at_the_real_size():
    options = dict(image_size=32, patch_size=2, channels=3, dim=512, depth=12, heads=8)
    state, arguments = random_state(**options), inputs(**options, count=1)
    net = create_model("uvit-s/2", **PIXELS_32)
    net.load_state_dict(state, strict=True)
    with torch.no_grad():
        expected = official_forward(state, *arguments, **options)
        torch.testing.assert_close(net(*arguments), expected, atol=1e-5, rtol=1e-5)


# ---- initialisation


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
