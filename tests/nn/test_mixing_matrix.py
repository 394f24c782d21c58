"""The mixing matrix: in every network and kind of shortcut the input of each branch is the sum that it says."""

import pytest
import torch
from networks import CONCAT_SIT, DECAYED_SIT, SIT, UVIT, VIT, sources_of, watch
from torch import nn

from uvit_decay.decay import SHORTCUTS, attach, mixing_matrix, shortcuts
from uvit_decay.terminal.errors import UserError

KINDS = (UVIT, SIT, DECAYED_SIT, CONCAT_SIT, VIT)


@pytest.mark.parametrize("schedule", [name for name, kind in SHORTCUTS.items() if kind.numbers])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_input_of_each_branch_is_the_sum_of_its_row(kind, schedule):
    torch.manual_seed(0)
    net = kind.loaded(schedule=schedule, alpha_min=0.7 if SHORTCUTS[schedule].falls else 1.0).double()
    for name, parameter in net.named_parameters():
        if name == "alphas":
            nn.init.uniform_(parameter, 0.5, 1.0)
        elif name == "betas":
            nn.init.constant_(parameter, 0.3)
        else:
            nn.init.normal_(parameter, std=0.2)
    seen = watch(net)
    arguments = kind.inputs()[:1] if kind is VIT else kind.inputs()  # without the ViT's stochastic depth
    with torch.no_grad():
        net(*(x.double() if x.is_floating_point() else x for x in arguments))
    sources = sources_of(seen)
    rows = torch.stack([*seen["inputs"], seen["blocks"][-1]])
    matrix = mixing_matrix(net)
    assert matrix.shape == (len(rows), len(sources))
    torch.testing.assert_close(torch.einsum("ls,sbnd->lbnd", matrix, sources), rows, rtol=1e-6, atol=1e-6)


def test_shortcuts_and_attached_networks_have_a_matrix_too():
    decayed = shortcuts(2, 0.7)
    matrix = mixing_matrix(decayed)
    a = decayed.alphas
    assert matrix[4].tolist() == pytest.approx([a[0] * a[1] * a[2] * a[3], a[1] * a[2] * a[3], a[2] * a[3], a[3], 1.0])
    assert torch.equal(matrix, matrix.tril())
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert torch.equal(mixing_matrix(attach(model, 0.7)).float(), matrix.float())


def test_gain_and_the_decay_differ_by_a_factor_for_each_row():
    """A norm divides by the length of its input, so only ratios within a row matter."""
    decayed, gained = mixing_matrix(shortcuts(6, 0.6)), mixing_matrix(shortcuts(6, 0.6, "gain"))
    torch.testing.assert_close(decayed / decayed[:, :1], gained, rtol=1e-12, atol=1e-12)


def test_a_merge_that_reads_the_stream_is_a_boundary_and_one_that_is_added_is_none():
    concatenated, added = mixing_matrix(CONCAT_SIT.small()), mixing_matrix(DECAYED_SIT.small())
    assert concatenated[4, :9].tolist() == [0.0] * 9
    assert concatenated[4, 9:].tolist() == [1.0, 0.0]
    assert added[4].tolist() == [1.0] * 5 + [0.0] * 4 + [1.0, 0.0]


def test_what_has_no_shortcuts_is_one_line():
    with pytest.raises(UserError, match="Linear"):
        mixing_matrix(nn.Linear(2, 2))
