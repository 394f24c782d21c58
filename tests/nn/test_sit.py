"""SiT against the published sizes, functions and initialisation; its times, skips and gradients.

The published layouts are in tests/checkpoint/test_official_sit.py.
"""

import math

import numpy as np
import pytest
import torch
from sit_reference import SMALL, VARIANTS, inputs, loaded, official_forward, random_state, small
from torch import nn

from uvit_decay.nn.embed import sincos_positions
from uvit_decay.nn.sizes import create_model

PARAMETERS = [
    # heads; with learn_sigma: all and trainable; without: all; decayed wiring with learn_sigma: all and trainable
    ("sit-s/2", 6, 32_963_360, 32_865_056, 32_957_200, 33_850_400, 33_752_096),
    ("sit-b/2", 12, 130_512_416, 130_315_808, 130_500_112, 134_055_968, 133_859_360),
    ("sit-l/2", 16, 458_102_816, 457_840_672, 458_086_416, 470_698_016, 470_435_872),
    ("sit-xl/2", 16, 675_129_632, 674_834_720, 675_111_184, 693_725_216, 693_430_304),
    ("sit-xl/4", 16, 675_074_432, 675_000_704, 675_000_640, 693_670_016, 693_596_288),
]


def meta(name, **options):
    with torch.device("meta"):
        return create_model(name, **dict(num_classes=1000) | options)


def count(net, trainable=False):
    return sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad or not trainable)


@pytest.mark.parametrize(("name", "heads", "sigma", "trainable", "plain", "decayed", "decayed_trainable"), PARAMETERS)
def test_sizes_are_the_published_ones(name, heads, sigma, trainable, plain, decayed, decayed_trainable):
    net = meta(name, learn_sigma=True)
    assert (net.config["heads"], count(net), count(net, trainable=True)) == (heads, sigma, trainable)
    assert count(meta(name)) == plain
    net = meta(name, learn_sigma=True, wiring="decayed", alpha_min=0.8)
    assert (count(net), count(net, trainable=True)) == (decayed, decayed_trainable)


@pytest.mark.parametrize("alpha_min", [1.0, 0.6])
@pytest.mark.parametrize("variant", VARIANTS)
def test_published_weights_give_the_published_function_at_the_reversed_time(variant, alpha_min):
    options = SMALL | VARIANTS[variant]
    state, (x, t, y) = random_state(**options), inputs(**options)
    net = small(**options, alpha_min=alpha_min).eval()
    net.load_state_dict(state, strict=True)
    last = 2 * options["depth"] - 1
    alphas = [1 - (1 - alpha_min) * k / last for k in range(last + 1)]
    with torch.no_grad():
        expected = official_forward(state, x, 1 - t, y, **options, alphas=alphas)
        assert expected.std() > 0.3
        torch.testing.assert_close(net(x, t, y), expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(official_forward(state, x, t, y, **options, alphas=alphas), expected, atol=1e-3)


def test_tokens_of_small_variance_meet_the_published_epsilon_of_the_norms():
    state, (x, t, y) = random_state(**SMALL), inputs()
    state |= {name: 0.003 * state[name] for name in state if name.startswith(("pos_embed", "x_embedder"))}
    net = small()
    net.load_state_dict(state, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(net(x, t, y), official_forward(state, x, 1 - t, y, **SMALL), atol=1e-5, rtol=1e-5)


def test_positions_are_fixed_waves_of_column_then_row():
    side, dim = 4, 16
    omega = 1 / 10000 ** (np.arange(dim // 4) / (dim / 4.0))
    expected = np.zeros((side * side, dim))
    for row in range(side):
        for column in range(side):
            parts = [wave(place * omega) for place in (column, row) for wave in (np.sin, np.cos)]
            expected[row * side + column] = np.concatenate(parts)
    np.testing.assert_allclose(sincos_positions(side, dim).numpy(), expected, atol=1e-7)
    net = small()
    assert torch.equal(net.pos_embed[0], sincos_positions(side, dim))
    assert not net.pos_embed.requires_grad
    assert net.pos_embed.dtype == torch.float32


@pytest.mark.parametrize("options", [dict(), dict(wiring="decayed"), dict(wiring="decayed", skip="concat")])
def test_initialisation_has_the_published_statistics(options):
    net = small(dim=256, heads=4, num_classes=100, **options)
    zero, normal = {"final_layer.linear"}, {"t_embedder.mlp.0", "t_embedder.mlp.2"}
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            assert not module.bias.any(), name
            weight = module.weight.flatten(1)
            bound = math.sqrt(6 / sum(weight.shape))
            std = 0.02 if name in normal else bound / math.sqrt(3)
            if name in zero or "adaLN_modulation" in name:
                assert not weight.any(), name
                continue
            assert weight.std().item() == pytest.approx(std, rel=0.05), name
            if name not in normal:
                assert 0.95 * bound < weight.abs().max() <= bound, name
    assert net.y_embedder.embedding_table.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_dit_embeds_its_levels_exactly_and_other_times_between_them():
    net, seen = loaded(time="dit"), []
    net.t_embedder.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    t = torch.arange(1, 1001) / 1000
    net(torch.zeros(1000, 4, 8, 8), t, torch.zeros(1000, dtype=torch.int64))
    assert torch.equal(seen[0], torch.arange(1000.0))
    net(torch.zeros(3, 4, 8, 8), torch.tensor([0.0, 0.0015, 0.9994]), torch.zeros(3, dtype=torch.int64))
    assert seen[1].tolist() == pytest.approx([-1, 0.5, 998.4], abs=1e-4)


def test_a_fresh_decayed_trunk_adds_the_skip_of_its_height_before_the_alphas():
    net = small(wiring="decayed", alpha_min=0.6)
    alphas = [1 - 0.4 * k / 7 for k in range(8)]
    with torch.no_grad():
        states = list(net.forward_intermediates(*inputs()))
        for j, read in enumerate((2, 1)):  # the state after the last encoder block first, then the one before it
            merged = states[2 + j] + states[read] @ net.dec_blocks[j].skip.weight.T
            torch.testing.assert_close(states[3 + j], merged * alphas[4 + 2 * j] * alphas[5 + 2 * j])
            assert not torch.allclose(states[3 + j], states[2 + j], atol=0.1)


@pytest.mark.parametrize("skip", ["add", "concat"])
def test_skips_start_random_unless_they_are_to_start_silent(skip):
    for block in small(wiring="decayed", skip=skip).dec_blocks:
        assert block.skip.weight.std() > 0.1
    silent = torch.eye(16, 32) if skip == "concat" else torch.zeros(16, 16)
    for block in small(wiring="decayed", skip=skip, skip_zero_init=True).dec_blocks:
        assert torch.equal(block.skip.weight, silent)
        assert not block.skip.bias.any()


@pytest.mark.parametrize(
    "wiring", [dict(wiring="official"), dict(wiring="decayed"), dict(wiring="decayed", skip="concat")]
)
def test_alpha_min_changes_no_random_draw_of_the_initialisation(wiring):
    plain, decayed = small(**wiring).state_dict(), small(alpha_min=0.7, **wiring).state_dict()
    assert [key for key in plain if not torch.equal(plain[key], decayed[key])] == ["alphas"]


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(wiring="decayed"),
        dict(wiring="decayed", skip_zero_init=True),
        dict(wiring="decayed", skip="concat", skip_zero_init=True),
        dict(learn_sigma=True),
        dict(num_classes=0, schedule="learnable"),
    ],
)
def test_after_a_few_steps_gradients_reach_every_trained_parameter(options):
    net = small(alpha_min=0.7, **options)
    x, t, y = inputs(**SMALL | options)
    positions = net.pos_embed.clone()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        (net(x, t, y) - x).square().mean().backward()
        optimizer.step()
    silent = [name for name, parameter in net.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert silent == ["pos_embed"]
    assert torch.equal(net.pos_embed, positions)
