"""The decay of U-ViT and SiT alike: its operations, files of another decay, learnable and fixed alphas."""

import pytest
import torch
from networks import each_kind
from record_ops import record
from refusals import raises_user_error
from torch import nn

from uvit_decay.decay import shortcuts


@each_kind
def test_the_decayed_forward_pass_runs_the_same_operations_as_the_ordinary_one(kind):
    plain, decayed = (record(kind.loaded(alpha_min=alpha_min), kind.inputs()) for alpha_min in (1.0, 0.7))
    assert decayed == plain


@each_kind
@pytest.mark.parametrize(
    ("stored", "asked", "named"),
    [
        (dict(alpha_min=0.8), dict(alpha_min=0.7), ("0.8]", "0.7]")),
        (dict(alpha_min=1.0), dict(alpha_min=0.7), ("1 .. 1]", "0.7]")),
        (dict(alpha_min=0.7), dict(alpha_min=1.0), ("0.7]", "1 .. 1]")),
        (dict(alpha_min=0.7, depth=2), dict(alpha_min=0.7, depth=4), ("({fewer} numbers)", "({all} numbers)")),
        (dict(alpha_min=0.7, schedule="learnable"), dict(alpha_min=0.8), ("0.7]", "0.8]")),
    ],
)
def test_weights_of_another_decay_are_refused_with_both_named(stored, asked, named, kind):
    net = kind.small(**asked)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    counts = {"fewer": 2 * kind.blocks - 4, "all": 2 * kind.blocks}
    for strict in (True, False):
        with raises_user_error(*(fragment.format(**counts) for fragment in named)):
            net.load_state_dict(kind.loaded(**stored).state_dict(), strict=strict)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


@each_kind
@pytest.mark.parametrize(
    "value", [torch.tensor(1.0), torch.ones(12, 2), torch.full((12,), 2), torch.full((12,), torch.nan)]
)
def test_alphas_of_another_form_are_refused(value, kind):
    net = kind.small(alpha_min=1.0)
    with raises_user_error("alphas"):
        net.load_state_dict({**net.state_dict(), "alphas": value})


@each_kind
@pytest.mark.parametrize(
    "options", [dict(alpha_min=1.0), dict(alpha_min=0.7), dict(alpha_min=0.7, schedule="learnable")]
)
def test_files_without_alphas_load_strictly_and_leave_the_alphas_as_asked(options, kind):
    net = kind.small(**options)
    net.load_state_dict(kind.random_state(), strict=True)
    assert torch.equal(net.alphas.detach(), torch.tensor(shortcuts(kind.blocks, options["alpha_min"]).alphas))
    assert ("alphas" in dict(net.named_parameters())) == ("schedule" in options)


@each_kind
def test_the_decay_is_checked_under_a_prefix_too(kind):
    wrapped, other = (nn.ModuleDict({"net": kind.small(alpha_min=alpha_min)}) for alpha_min in (0.7, 0.8))
    wrapped.load_state_dict({"net." + key: value for key, value in kind.random_state().items()}, strict=True)
    with raises_user_error("alphas"):
        wrapped.load_state_dict(other.state_dict())


@each_kind
def test_weights_in_bf16_load_into_a_float32_network(kind):
    net = kind.small(alpha_min=0.7)
    net.load_state_dict({name: value.bfloat16() for name, value in net.state_dict().items()})
