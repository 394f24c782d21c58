"""SiT's state_dict from one layout to another: the same function."""

import pytest
import torch
from official_files import plain_head
from sit_reference import SMALL, inputs, loaded, random_state, small

from uvit_decay.checkpoint.official.sit import to_decayed_wiring
from uvit_decay.runtime.errors import UserError


@pytest.mark.parametrize("depth", [2, 4, 6])
@pytest.mark.parametrize("alpha_min", [1.0, 0.7])
def test_official_weights_in_the_decayed_wiring_are_the_same_function(depth, alpha_min):
    source = loaded(depth=depth, alpha_min=alpha_min)
    state = source.state_dict()
    before = dict(state)
    target = small(depth=depth, wiring="decayed", alpha_min=alpha_min)
    target.load_state_dict(to_decayed_wiring(state, depth), strict=True)
    assert state.keys() == before.keys()
    arguments = inputs()
    with torch.no_grad():
        assert torch.equal(target(*arguments), source(*arguments))
        target.dec_blocks[depth // 2 - 1].skip.bias[0] += 1.0  # in one channel: the norms forget what is in all
        assert not torch.allclose(target(*arguments), source(*arguments), atol=1e-2)


def test_renamed_weights_keep_the_precision_and_share_the_tensors():
    state = {name: value.bfloat16() for name, value in random_state(**SMALL).items()}
    renamed = to_decayed_wiring(state, 4)
    assert {value.dtype for value in renamed.values()} == {torch.bfloat16}
    assert renamed["dec_blocks.1.mlp.fc2.bias"] is state["blocks.3.mlp.fc2.bias"]


@pytest.mark.parametrize(
    ("options", "depth", "named"),
    [(dict(), 3, "even"), (dict(), 6, "depth 6"), (dict(), 2, "depth 2"), (dict(wiring="decayed"), 4, "official")],
)
def test_weights_of_another_network_are_not_renamed(options, depth, named):
    with pytest.raises(UserError, match=named):
        to_decayed_wiring(random_state(**SMALL | options), depth)


@pytest.mark.parametrize("options", [dict(), dict(wiring="decayed"), dict(patch_size=4, channels=3)])
def test_weights_without_sigma_are_the_first_half_of_the_channels(options):
    source, target = loaded(**options, learn_sigma=True), small(**options)
    target.load_state_dict(plain_head(source.state_dict()), strict=True)
    arguments = inputs(**SMALL | options)
    with torch.no_grad():
        torch.testing.assert_close(target(*arguments), source(*arguments), atol=1e-6, rtol=1e-6)
