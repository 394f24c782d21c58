"""Norms of residual branches that hooks see, against the terms of the sums."""

import pytest
from networks import each_kind
from refusals import raises_user_error
from torch import nn

from uvit_decay.callbacks.branches import BranchTerms
from uvit_decay.decay import decayed_add
from uvit_decay.decay.depth_attention import Sources
from uvit_decay.nn import ResNet


def rms(x):
    return float(x.square().mean().sqrt())


@each_kind
@pytest.mark.parametrize(
    "options", [{"alpha_min": 0.6}, {"schedule": "gain", "alpha_min": 0.6}, {"schedule": "learnable"}]
)
def test_norms_are_those_of_the_terms_of_each_sum(kind, options, monkeypatch):
    net, terms = kind.loaded(**options), []

    def noted(x, f, alpha, beta=1.0):
        terms.append((rms(x), rms(beta * f)))
        return decayed_add(x, f, alpha, beta)

    monkeypatch.setattr("uvit_decay.decay.weights.decayed_add", noted)
    observed = BranchTerms(net)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())
    observed.start()
    net(*kind.inputs())
    observed.stop()
    assert [float(x) for x in observed.x] == pytest.approx([x for x, _ in terms])
    assert [float(f) for f in observed.f] == pytest.approx([f for _, f in terms], rel=1e-3)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()) == hooks


@each_kind
@pytest.mark.parametrize("schedule", ["attnres", "attnres-2", "dar"])
def test_attention_over_depth_has_the_norms_of_what_branches_read_and_write(kind, schedule, monkeypatch):
    net = kind.small(schedule=schedule)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)
    written, read, add = [], [], Sources.add_branch

    def noted(sources, output):
        written.append(rms(output))
        return add(sources, output)

    monkeypatch.setattr(Sources, "add_branch", noted)
    for decayed in net.find_decayed_blocks().values():
        for norm in (decayed.norm1, decayed.norm2):
            norm.register_forward_pre_hook(lambda _, args: read.append(rms(args[0])))
    observed = BranchTerms(net)
    observed.start()
    net(*kind.inputs())
    observed.stop()
    assert observed.f == pytest.approx(written)
    assert observed.x == pytest.approx(read)
    assert not any(module._forward_hooks for module in net.depth_attention.modules())


def test_a_resnet_is_refused():
    with raises_user_error("BranchNorms"):
        BranchTerms(ResNet(16, width=8, stem="cifar"))
