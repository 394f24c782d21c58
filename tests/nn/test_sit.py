"""SiT in use, as no other network: time, variance, the decay and its skips, initialisation."""

import pytest
import torch
from sit_reference import SMALL, inputs, loaded, small


def test_data_is_embedded_as_one_and_noise_as_zero():
    net, seen = loaded(), []
    net.t_embedder.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    x, _, y = inputs()
    net(x, torch.tensor([0.0, 0.25, 1.0]), y)
    assert seen[0].tolist() == [1.0, 0.75, 0.0]


def test_dit_embeds_its_levels_exactly_and_other_times_between_them():
    net, seen = loaded(time="dit"), []
    net.t_embedder.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    t = torch.arange(1, 1001) / 1000
    net(torch.zeros(1000, 4, 8, 8), t, torch.zeros(1000, dtype=torch.int64))
    assert torch.equal(seen[0], torch.arange(1000.0))
    net(torch.zeros(3, 4, 8, 8), torch.tensor([0.0, 0.0015, 0.9994]), torch.zeros(3, dtype=torch.int64))
    assert seen[1].tolist() == pytest.approx([-1, 0.5, 998.4], abs=1e-4)


def test_a_learned_variance_is_the_second_half_of_the_channels():
    both, first = loaded(learn_sigma=True, learned_variance=True)(*inputs()), loaded(learn_sigma=True)(*inputs())
    assert both.shape == (3, 8, 8, 8)
    assert torch.equal(both[:, :4], first)
    assert both[:, 4:].std() > 0.3


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
