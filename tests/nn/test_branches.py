"""Terms of residual branches that hooks see, compared with the terms of the sums."""

import pytest
import torch
from networks import each_kind
from torch import nn

from uvit_decay.callbacks.branches import BranchTerms, root_mean_squares
from uvit_decay.decay import decayed_add
from uvit_decay.decay.depth_attention import Sources
from uvit_decay.nn import ResNet


def rms(x):
    return float(x.square().mean().sqrt())


def count_hooks(net):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())


def observe(net, *inputs):
    """Return the terms of a forward pass; check that no hook remains."""
    hooks = count_hooks(net)
    observed = BranchTerms(net)
    observed.start()
    net(*inputs)
    observed.stop()
    assert count_hooks(net) == hooks
    return root_mean_squares(observed.sums)


def sums_of(monkeypatch):
    """Return a list to which every weighted sum adds the root mean squares of x and of beta f."""
    found = []

    def noted(x, f, alpha, beta=1.0):
        found.append((rms(x), rms(beta * f)))
        return decayed_add(x, f, alpha, beta)

    monkeypatch.setattr("uvit_decay.decay.weights.decayed_add", noted)
    return found


@each_kind
@pytest.mark.parametrize(
    "options", [{"alpha_min": 0.6}, {"schedule": "gain", "alpha_min": 0.6}, {"schedule": "learnable"}]
)
def test_norms_are_those_of_the_terms_of_each_sum(kind, options, monkeypatch):
    sums = sums_of(monkeypatch)
    terms = observe(kind.loaded(**options), *kind.inputs())
    assert terms == {name: pytest.approx([pair[i] for pair in sums]) for i, name in enumerate("xf")}


def test_a_resnet_has_the_norms_of_its_shortcuts_and_branches(monkeypatch):
    sums = sums_of(monkeypatch)
    terms = observe(ResNet(16, width=8, num_classes=3, stem="cifar", alpha_min=0.6), torch.randn(2, 3, 16, 16))
    assert terms == {name: pytest.approx([pair[i] for pair in sums]) for i, name in enumerate("xf")}


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
            norm.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    terms = observe(net, *kind.inputs())
    assert terms["f"] == pytest.approx(written)
    assert terms["x"] == pytest.approx(list(map(rms, read)))
    changes = [rms(after - before) for before, after in zip(read[::2], read[1::2], strict=True)]
    assert terms["change"][::2] == pytest.approx(changes)  # the attention of a block is followed by its MLP
