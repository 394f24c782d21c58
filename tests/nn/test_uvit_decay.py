"""The decay through the trunk of the U-ViT: its scales, silent starts, files of another decay, learnable alphas."""

import math

import pytest
import torch
from record_ops import RecordOps
from torch import nn
from uvit_reference import SMALL, inputs, loaded, official_forward, random_state, small

from uvit_decay.decay import shortcuts
from uvit_decay.errors import UserError

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
        (
            dict(alpha_min=0.6, schedule="cosine"),
            dict(alphas=[0.8 + 0.2 * math.cos(math.pi * k / 9) for k in range(10)]),
        ),
        (dict(alpha_min=0.6, schedule="learnable"), dict(alphas=[1 - 0.4 * k / 9 for k in range(10)])),
        (dict(schedule="constant"), dict(alphas=[math.sqrt(0.5)] * 10, betas=[math.sqrt(0.5)] * 10)),
        (dict(schedule="constant-branch"), dict(betas=[math.sqrt(0.5)] * 10)),
    ],
    ids=["linear", "linear-no-skip", "mlp-only-v2-blocks", "cosine", "learnable", "constant", "constant-branch"],
)
def test_decay_scales_the_shortcuts_in_execution_order_after_the_skip_merge(options, scales):
    net = loaded(num_classes=3, **options).eval()
    arguments = inputs(num_classes=3)
    with torch.no_grad():
        expected = official_forward(net.state_dict(), *arguments, **SMALL, **scales)
        torch.testing.assert_close(net(*arguments), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("alpha_min", [1.0, 0.7, 0.5])
def test_with_silent_branches_the_trunk_multiplies_the_embeddings_by_every_alpha(alpha_min):
    net = loaded(alpha_min=alpha_min, skip=False)
    for block in net.blocks():
        block.zero_init()
    with torch.no_grad():
        first, *_, last = net.trunk(*inputs())
    expected = first
    for k in range(10):
        expected = expected * (1.0 - (1.0 - alpha_min) * k / 9)
    assert torch.equal(last, expected)
    torch.testing.assert_close(last, first * math.prod(net.alphas.tolist()), atol=1e-6, rtol=1e-6)


def test_the_decayed_forward_pass_runs_the_same_operations_as_the_ordinary_one():
    plain, decayed = RecordOps(), RecordOps()
    for recorder, alpha_min in ((plain, 1.0), (decayed, 0.7)):
        net = loaded(alpha_min=alpha_min, num_classes=3)
        with recorder, torch.no_grad():
            net(*inputs(num_classes=3))
    assert decayed.ops == plain.ops
    assert decayed.ops.count("aten.add.Tensor") == 10 + 1


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


def test_alpha_min_changes_no_random_draw_of_the_initialisation():
    plain, decayed = small().state_dict(), small(alpha_min=0.7, zero_init=False).state_dict()
    assert [key for key in plain if not torch.equal(plain[key], decayed[key])] == ["alphas"]


# ---- loading


@pytest.mark.parametrize(
    ("stored", "asked", "named"),
    [
        (dict(alpha_min=0.8), dict(alpha_min=0.7), r"0\.8] .* 0\.7] "),
        (dict(alpha_min=1.0), dict(alpha_min=0.7), r"1 \.\. 1] .* 0\.7] "),
        (dict(alpha_min=0.7), dict(alpha_min=1.0), r"0\.7] .* 1 \.\. 1] "),
        (dict(alpha_min=0.7, depth=2), dict(alpha_min=0.7, depth=4), r"\(6 branches\).* \(10 branches\)"),
        (dict(alpha_min=0.7, schedule="cosine"), dict(alpha_min=0.7), "alphas"),
        (dict(alpha_min=0.7, schedule="learnable"), dict(alpha_min=0.8), r"0\.7] .* 0\.8] "),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_weights_of_another_decay_are_refused_with_both_named(stored, asked, named, strict):
    with pytest.raises(UserError, match=named):
        small(**asked).load_state_dict(small(**stored).state_dict(), strict=strict)


def test_refused_weights_leave_the_network_as_it_was():
    net = small(alpha_min=0.7)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(UserError):
        net.load_state_dict(loaded(alpha_min=0.8).state_dict())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_weights_round_trip_through_their_own_decay():
    source, target = loaded(alpha_min=0.7, num_classes=3), small(alpha_min=0.7, num_classes=3)
    target.load_state_dict(source.state_dict(), strict=True)
    arguments = inputs(num_classes=3)
    assert torch.equal(source(*arguments), target(*arguments))


@pytest.mark.parametrize(
    "options", [dict(alpha_min=1.0), dict(alpha_min=0.7), dict(alpha_min=0.7, schedule="learnable")]
)
def test_files_without_alphas_load_strictly_and_leave_the_alphas_as_asked(options):
    net = small(**options)
    net.load_state_dict(random_state(**SMALL), strict=True)
    assert torch.equal(net.alphas.detach(), torch.tensor(shortcuts(5, options["alpha_min"]).alphas))


def test_the_decay_is_checked_under_a_prefix_too():
    wrapped, other = nn.ModuleDict({"net": small(alpha_min=0.7)}), nn.ModuleDict({"net": small(alpha_min=0.8)})
    wrapped.load_state_dict({"net." + key: value for key, value in random_state(**SMALL).items()}, strict=True)
    with pytest.raises(UserError, match="alphas"):
        wrapped.load_state_dict(other.state_dict())


def test_learned_alphas_travel_with_the_weights():
    source, target = loaded(schedule="learnable", alpha_min=0.7), small(schedule="learnable")
    with torch.no_grad():
        source.alphas.mul_(0.9)
    target.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(target.alphas, source.alphas)
    assert torch.equal(target(*inputs()), source(*inputs()))


# ---- learnable and fixed alphas


def test_learnable_alphas_are_parameters_and_all_receive_gradients():
    net = loaded(schedule="learnable", alpha_min=0.7)
    assert any(parameter is net.alphas for parameter in net.parameters())
    net(*inputs()).square().mean().backward()
    assert net.alphas.grad.shape == (10,)
    assert net.alphas.grad.all()


def test_gradients_of_learnable_alphas_match_finite_differences():
    net = loaded(schedule="learnable", alpha_min=0.7).double()
    x, t, _ = inputs()

    def loss(alphas):
        return torch.func.functional_call(net, {"alphas": alphas}, (x.double(), t)).square().mean()

    assert torch.autograd.gradcheck(loss, net.alphas.detach().clone().requires_grad_())


def test_fixed_alphas_are_no_parameters():
    net = small(alpha_min=0.7)
    assert "alphas" in dict(net.named_buffers())
    assert "alphas" not in dict(net.named_parameters())


def test_a_scaled_branch_is_not_the_ordinary_network():
    plain, scaled = small(), small(schedule="constant-branch")
    with pytest.raises(RuntimeError, match="betas"):
        plain.load_state_dict(scaled.state_dict())
    with pytest.raises(UserError, match="betas"):
        scaled.load_state_dict(plain.state_dict())


def test_weights_in_bf16_load_into_a_float32_network():
    net = small(alpha_min=0.7)
    net.load_state_dict({name: value.bfloat16() for name, value in net.state_dict().items()})
