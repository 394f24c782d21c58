"""U-ViT in use, as no other network: loading, precision, taps and user errors."""

import jaxtyping
import pytest
import torch
from uvit_reference import SMALL, inputs, loaded, random_state, small

from uvit_decay.nn.intermediates import HasIntermediates, pooled_features
from uvit_decay.runtime.errors import UserError

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


# ---- taps


@pytest.mark.parametrize("depth", [2, 4, 12])
def test_stages_are_the_embeddings_and_every_block_in_execution_order(depth):
    net, half = small(depth=depth), depth // 2
    assert [stage.name for stage in net.layers] == [
        "embeddings",
        *(f"in_blocks.{i}" for i in range(half)),
        "mid_block",
        *(f"out_blocks.{i}" for i in range(half)),
    ]
    assert [stage.kind for stage in net.layers] == [
        "embeddings", *["encoder"] * half, "middle", *["decoder"] * half
    ]  # fmt: skip
    assert len(net.blocks()) == depth + 1
    assert isinstance(net, HasIntermediates)


def test_pooled_features_are_float32_under_bfloat16_autocast():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert pooled_features(loaded(), *inputs()[:2]).dtype == torch.float32


# ---- user errors


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(depth=3), "depth"),
        (dict(depth=0), "depth"),
        (dict(image_size=9), "image_size 9"),
        (dict(patch_size=3), "patch_size 3"),
        (dict(heads=3), "heads 3"),
        (dict(alpha_min=0.0), "alpha_min"),
        (dict(init="kaiming"), "init must be official or xavier, got 'kaiming'"),
    ],
)
def test_impossible_networks_are_user_errors_of_one_line_that_name_the_option(options, named, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # whose checks of types would come first
    with pytest.raises(UserError, match=named) as error:
        small(**options)
    assert "\n" not in str(error.value)
