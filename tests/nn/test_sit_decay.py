"""The decay through the trunk of SiT: its scales, silent starts, training, loading."""

import math

import pytest
import torch
from sit_reference import SMALL, inputs, loaded, official_forward, random_state, small

WIRINGS = [dict(wiring="official"), dict(wiring="decayed"), dict(wiring="decayed", skip="concat")]

# ---- the function


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize(
    ("options", "scales"),
    [
        (dict(alpha_min=0.6), dict(alphas=[1 - 0.4 * k / 7 for k in range(8)])),
        (
            dict(alpha_min=0.6, granularity="block", index="v2", branches="mlp"),
            dict(alphas=[1, 0.9, 1, 0.8, 1, 0.7, 1, 0.6]),
        ),
        (dict(schedule="constant"), dict(alphas=[math.sqrt(0.5)] * 8, betas=[math.sqrt(0.5)] * 8)),
    ],
    ids=["linear", "mlp-only-v2-blocks", "constant"],
)
def test_decay_scales_the_shortcuts_in_execution_order_after_the_skip_merge(options, scales, wiring):
    net, (x, t, y) = loaded(**options, **wiring).eval(), inputs()
    with torch.no_grad():
        expected = official_forward(net.state_dict(), x, 1 - t, y, **SMALL, **scales)
        torch.testing.assert_close(net(x, t, y), expected, atol=1e-5, rtol=1e-5)


def test_a_fresh_decayed_trunk_adds_the_skip_of_its_height_before_the_alphas():
    net = small(wiring="decayed", alpha_min=0.6)
    alphas = [1 - 0.4 * k / 7 for k in range(8)]
    with torch.no_grad():
        states = list(net.forward_intermediates(*inputs()))
        for j, read in enumerate((2, 1)):  # the state after the last encoder block first, then the one before it
            merged = states[2 + j] + states[read] @ net.dec_blocks[j].skip.weight.T
            torch.testing.assert_close(states[3 + j], merged * alphas[4 + 2 * j] * alphas[5 + 2 * j])
            assert not torch.allclose(states[3 + j], states[2 + j], atol=0.1)


# ---- initialisation


@pytest.mark.parametrize("skip", ["add", "concat"])
def test_skips_start_random_unless_they_are_to_start_silent(skip):
    for block in small(wiring="decayed", skip=skip).dec_blocks:
        assert block.skip.weight.std() > 0.1
    silent = torch.eye(16, 32) if skip == "concat" else torch.zeros(16, 16)
    for block in small(wiring="decayed", skip=skip, skip_zero_init=True).dec_blocks:
        assert torch.equal(block.skip.weight, silent)
        assert not block.skip.bias.any()


@pytest.mark.parametrize("wiring", WIRINGS)
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


# ---- loading


@pytest.mark.parametrize("wiring", WIRINGS)
def test_weights_round_trip_and_the_config_builds_the_network_again(wiring):
    source = loaded(alpha_min=0.7, schedule="learnable", **wiring)
    with torch.no_grad():
        source.alphas.mul_(0.9)
    target = type(source)(**source.config)
    target.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(source(*inputs()), target(*inputs()))


@pytest.mark.parametrize("wiring", WIRINGS[1:])
def test_weights_of_the_other_wiring_do_not_load(wiring):
    with pytest.raises(RuntimeError, match=r"blocks\.0"):
        small(**wiring).load_state_dict(random_state(**SMALL))
