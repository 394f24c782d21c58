"""U-ViT in use: checkpointing of activations, loading, labels, precision, compilation, taps and user errors."""

import math

import jaxtyping
import pytest
import torch
from uvit_reference import SMALL, inputs, loaded, random_state, small

from uvit_decay.errors import UserError
from uvit_decay.nn.tap import Tapped, pooled_features

# ---- checkpointing of activations


def gradients(net):
    net(*inputs(num_classes=3)).square().mean().backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("schedule", ["linear", "learnable"])
def test_recomputed_activations_give_identical_loss_and_gradients(schedule):
    options = dict(num_classes=3, alpha_min=0.7, schedule=schedule)
    plain, recomputed = loaded(**options), loaded(**options, checkpointing=True)
    assert torch.equal(plain(*inputs(num_classes=3)), recomputed(*inputs(num_classes=3)))
    expected, actual = gradients(plain), gradients(recomputed)
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        assert gradient is not None, name
        assert torch.equal(gradient, actual[name]), name


@pytest.mark.parametrize(("checkpointing", "training", "runs"), [(True, True, 2), (True, False, 1), (False, True, 1)])
def test_blocks_are_recomputed_only_with_checkpointing_and_in_training(checkpointing, training, runs):
    net = loaded(num_classes=3, checkpointing=checkpointing).train(training)
    calls = []
    for block in net.blocks():
        block.register_forward_pre_hook(lambda block, _: calls.append(block))
    gradients(net)
    assert [calls.count(block) for block in net.blocks()] == [runs] * 5


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


# ---- labels


def test_no_labels_means_the_null_label():
    net = loaded(num_classes=3)
    x, t, labels = inputs(num_classes=3)
    assert torch.equal(net(x, t), net(x, t, torch.full((3,), 3)))
    assert not torch.allclose(net(x, t), net(x, t, labels))


def test_a_network_without_null_label_asks_for_classes():
    net = loaded(num_classes=3, null_label=False)
    x, t, labels = inputs(num_classes=3)
    assert net(x, t, labels).shape == x.shape
    with pytest.raises(UserError, match="null label"):
        net(x, t)
    with pytest.raises(UserError, match="null label"):
        pooled_features(net, x, t)


# ---- precision and compilation


@pytest.mark.parametrize(
    "options",
    [dict(alpha_min=1.0), dict(alpha_min=0.7), dict(alpha_min=0.7, schedule="learnable"), dict(schedule="constant")],
)
def test_bfloat16_autocast_stays_close_to_float32(options):
    net, arguments = loaded(num_classes=3, **options), inputs(num_classes=3)
    with torch.no_grad():
        exact = net(*arguments)
        with torch.autocast("cpu", torch.bfloat16):
            rough = net(*arguments)
    error = (rough.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < error < 0.02


def test_bfloat16_autocast_leaves_the_embeddings_of_time_and_label_exact():
    net, arguments = loaded(num_classes=3), inputs(num_classes=3)
    with torch.no_grad():
        exact = next(net.trunk(*arguments))
        with torch.autocast("cpu", torch.bfloat16):
            rough = next(net.trunk(*arguments))
    assert rough.dtype == torch.float32
    assert torch.equal(rough[:, :2], exact[:, :2])


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(num_classes=3), dict(schedule="learnable")])
def test_compiled_network_is_one_graph_that_equals_eager_and_can_be_tapped(options, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace the checks of the tests
    net, arguments = loaded(**options, alpha_min=0.7, depth=2), inputs(**options)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), net(*arguments), atol=1e-6, rtol=1e-5)
    compiled(*arguments).square().mean().backward()
    actual = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
    net.zero_grad()
    net(*arguments).square().mean().backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(actual[name], parameter.grad, atol=1e-6, rtol=1e-4)
    assert torch.equal(pooled_features(compiled, *arguments[:2]), pooled_features(net, *arguments[:2]))


# ---- taps


@pytest.mark.parametrize("depth", [2, 4, 12])
def test_stages_are_the_embeddings_and_every_block_in_execution_order(depth):
    net, half = small(depth=depth), depth // 2
    assert [stage.name for stage in net.stages] == [
        "embeddings",
        *(f"in_blocks.{i}" for i in range(half)),
        "mid_block",
        *(f"out_blocks.{i}" for i in range(half)),
    ]
    assert [stage.kind for stage in net.stages] == [
        "embeddings", *["encoder"] * half, "middle", *["decoder"] * half
    ]  # fmt: skip
    assert len(net.blocks()) == depth + 1
    assert isinstance(net, Tapped)


def test_each_state_of_the_trunk_is_the_output_of_the_module_that_its_stage_names():
    net, seen = loaded(alpha_min=0.7, num_classes=3), {}
    for stage in net.stages[1:]:
        module = net.get_submodule(stage.name)
        module.register_forward_hook(lambda *call, name=stage.name: seen.setdefault(name, call[-1]))
    states = list(net.trunk(*inputs(num_classes=3)))
    assert len(states) == len(net.stages)
    assert list(seen) == [stage.name for stage in net.stages[1:]]
    for state, output in zip(states[1:], seen.values(), strict=True):
        assert state.shape == (3, 2 + 16, 16)
        assert torch.equal(state, output)


@pytest.mark.parametrize(("num_classes", "extras"), [(0, 1), (3, 2)])
def test_pooled_features_are_the_means_over_patch_tokens_under_the_null_label(num_classes, extras):
    net = loaded(alpha_min=0.7, num_classes=num_classes)
    x, t, _ = inputs()
    null = torch.full((3,), num_classes) if num_classes else None
    with torch.no_grad():
        features = pooled_features(net, x, t)
        states = list(net.trunk(x, t, null))
    assert features.shape == (6, 3, 16)
    for stage, state in enumerate(states):
        expected = sum(state[:, token] for token in range(extras, extras + 16)) / 16
        torch.testing.assert_close(features[stage], expected, atol=1e-6, rtol=1e-5)


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
        (dict(alpha_min=-0.5), "alpha_min"),
        (dict(alpha_min=1.5), "alpha_min"),
        (dict(alpha_min=math.nan), "alpha_min"),
        (dict(alpha_min=0.7, schedule="constant"), "alpha_min"),
        (dict(init="kaiming"), "init must be official or xavier, got 'kaiming'"),
    ],
)
def test_impossible_networks_are_user_errors_of_one_line_that_name_the_option(options, named, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # whose checks of types would come first
    with pytest.raises(UserError, match=named) as error:
        small(**options)
    assert "\n" not in str(error.value)
