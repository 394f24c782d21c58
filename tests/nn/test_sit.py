"""SiT in use: checkpointing of activations, labels, time, precision, compilation, taps and user errors."""

import math

import jaxtyping
import pytest
import torch
from sit_reference import inputs, loaded, small

from uvit_decay.errors import UserError
from uvit_decay.nn.tap import Tapped, pooled_features

WIRINGS = [dict(wiring="official"), dict(wiring="decayed"), dict(wiring="decayed", skip="concat")]

# ---- checkpointing of activations


def gradients(net):
    net(*inputs()).square().mean().backward()
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("schedule", ["linear", "learnable"])
def test_recomputed_activations_give_identical_loss_and_gradients(schedule, wiring):
    options = dict(alpha_min=0.7, schedule=schedule, **wiring)
    plain, recomputed = loaded(**options), loaded(**options, checkpointing=True)
    assert torch.equal(plain(*inputs()), recomputed(*inputs()))
    expected, actual = gradients(plain), gradients(recomputed)
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        assert gradient is not None, name
        assert torch.equal(gradient, actual[name]), name


@pytest.mark.parametrize(("checkpointing", "training", "runs"), [(True, True, 2), (True, False, 1), (False, True, 1)])
@pytest.mark.parametrize("wiring", ["official", "decayed"])
def test_blocks_are_recomputed_only_with_checkpointing_and_in_training(checkpointing, training, runs, wiring):
    net = loaded(checkpointing=checkpointing, wiring=wiring).train(training)
    calls = []
    blocks = [net.get_submodule(stage.name) for stage in net.stages[1:]]
    for block in blocks:
        block.register_forward_pre_hook(lambda block, _: calls.append(block))
    gradients(net)
    assert [calls.count(block) for block in blocks] == [runs] * 4


# ---- labels and time


def test_no_labels_means_the_null_label():
    net = loaded()
    x, t, labels = inputs()
    assert torch.equal(net(x, t), net(x, t, torch.full((3,), 3)))
    assert not torch.allclose(net(x, t), net(x, t, labels))


def test_a_network_without_null_label_asks_for_classes():
    net = loaded(null_label=False)
    x, t, labels = inputs()
    assert net(x, t, labels).shape == x.shape
    with pytest.raises(UserError, match="null label"):
        net(x, t)
    with pytest.raises(UserError, match="null label"):
        pooled_features(net, x, t)


def test_an_unconditional_network_has_no_labels_and_no_null_label():
    net = loaded(num_classes=0)
    assert (net.num_classes, net.null_label) == (0, False)
    assert not [name for name in net.state_dict() if name.startswith("y_embedder")]
    x, t, _ = inputs()
    assert net(x, t).std() > 0.3


def test_data_is_embedded_as_one_and_noise_as_zero():
    net, seen = loaded(), []
    net.t_embedder.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    x, _, y = inputs()
    net(x, torch.tensor([0.0, 0.25, 1.0]), y)
    assert seen[0].tolist() == [1.0, 0.75, 0.0]


def test_the_second_half_of_the_channels_changes_nothing():
    net = loaded(learn_sigma=True)
    before = net(*inputs())
    head = net.final_layer.linear
    with torch.no_grad():
        head.weight.view(4, 8, 16)[:, 4:] += 1.0
        head.bias.view(4, 8)[:, 4:] += 1.0
    assert torch.equal(net(*inputs()), before)


# ---- precision and compilation


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize(
    "options",
    [dict(alpha_min=1.0), dict(alpha_min=0.7), dict(alpha_min=0.7, schedule="learnable"), dict(schedule="constant")],
)
def test_bfloat16_autocast_stays_close_to_float32(options, wiring):
    net, arguments = loaded(**options, **wiring), inputs()
    with torch.no_grad():
        exact = net(*arguments)
        with torch.autocast("cpu", torch.bfloat16):
            rough = net(*arguments)
    error = (rough.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < error < 0.02


def test_bfloat16_autocast_leaves_the_embedding_of_time_exact():
    net = loaded()
    times = torch.tensor([0.5, 0.5005])
    exact = net.t_embedder(times)
    with torch.autocast("cpu", torch.bfloat16):
        rough = net.t_embedder(times)
    assert rough.dtype == torch.float32
    assert torch.equal(rough, exact)
    assert not torch.equal(rough[0], rough[1])


@pytest.mark.parametrize("wiring", WIRINGS)
def test_training_under_bfloat16_autocast_has_finite_float32_gradients(wiring):
    net = loaded(alpha_min=0.7, checkpointing=True, **wiring)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(net)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(), dict(wiring="decayed"), dict(schedule="learnable", num_classes=0)])
def test_compiled_network_is_one_graph_that_equals_eager_and_can_be_tapped(options, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace the checks of the tests
    net, arguments = loaded(**options, alpha_min=0.7, depth=2), inputs(**options)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), net(*arguments), atol=1e-6, rtol=1e-5)
    compiled(*arguments).square().mean().backward()
    actual = {name: parameter.grad.clone() for name, parameter in net.named_parameters() if parameter.requires_grad}
    net.zero_grad()
    net(*arguments).square().mean().backward()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, net.get_parameter(name).grad, atol=1e-6, rtol=1e-4)
    assert torch.equal(pooled_features(compiled, *arguments[:2]), pooled_features(net, *arguments[:2]))


# ---- taps


@pytest.mark.parametrize("depth", [2, 4, 12])
def test_stages_are_the_embeddings_and_every_block_in_execution_order(depth):
    half = depth // 2
    names = {
        "official": [f"blocks.{i}" for i in range(depth)],
        "decayed": [f"{side}_blocks.{i}" for side in ("enc", "dec") for i in range(half)],
    }
    for wiring, blocks in names.items():
        net = small(depth=depth, wiring=wiring)
        assert [stage.name for stage in net.stages] == ["embeddings", *blocks]
        assert [stage.kind for stage in net.stages] == ["embeddings", *["encoder"] * half, *["decoder"] * half]
        assert isinstance(net, Tapped)


@pytest.mark.parametrize(("depth", "kinds"), [(1, ["middle"]), (3, ["encoder", "middle", "decoder"])])
def test_an_odd_depth_has_a_middle_block(depth, kinds):
    assert [stage.kind for stage in small(depth=depth).stages[1:]] == kinds


@pytest.mark.parametrize("wiring", WIRINGS)
def test_each_state_of_the_trunk_is_the_output_of_the_module_that_its_stage_names(wiring):
    net, seen = loaded(alpha_min=0.7, **wiring), {}
    for stage in net.stages[1:]:
        module = net.get_submodule(stage.name)
        module.register_forward_hook(lambda *call, name=stage.name: seen.setdefault(name, call[-1]))
    states = list(net.trunk(*inputs()))
    assert len(states) == len(net.stages)
    assert list(seen) == [stage.name for stage in net.stages[1:]]
    for state, output in zip(states[1:], seen.values(), strict=True):
        assert state.shape == (3, 16, 16)
        assert torch.equal(state, output)


@pytest.mark.parametrize("num_classes", [0, 3])
def test_pooled_features_are_the_means_over_all_tokens_under_the_null_label(num_classes):
    net = loaded(alpha_min=0.7, num_classes=num_classes, wiring="decayed")
    x, t, _ = inputs()
    null = torch.full((3,), num_classes) if num_classes else None
    with torch.no_grad():
        features = pooled_features(net, x, t)
        states = list(net.trunk(x, t, null))
    assert features.shape == (5, 3, 16)
    for stage, state in enumerate(states):
        expected = sum(state[:, token] for token in range(16)) / 16
        torch.testing.assert_close(features[stage], expected, atol=1e-6, rtol=1e-5)


# ---- user errors


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(depth=0), "depth"),
        (dict(depth=3, wiring="decayed"), "depth must be even"),
        (dict(depth=0, wiring="decayed"), "depth"),
        (dict(image_size=9), "image_size 9"),
        (dict(patch_size=3), "patch_size 3"),
        (dict(patch_size=0), "patch_size"),
        (dict(num_classes=-1), "num_classes"),
        (dict(heads=3), "heads 3"),
        (dict(dim=18), "dim 18 is not divisible by 4"),
        (dict(alpha_min=0.0), "alpha_min"),
        (dict(alpha_min=1.5), "alpha_min"),
        (dict(alpha_min=math.nan), "alpha_min"),
        (dict(alpha_min=0.7, schedule="constant"), "alpha_min"),
        (dict(skip="concat"), "decayed wiring"),
        (dict(skip_zero_init=True), "decayed wiring"),
        (dict(wiring="unet"), "wiring must be official or decayed, got 'unet'"),
        (dict(wiring="decayed", skip="mul"), "skip must be add or concat, got 'mul'"),
    ],
)
def test_impossible_networks_are_user_errors_of_one_line_that_name_the_option(options, named, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # whose checks of types would come first
    with pytest.raises(UserError, match=named) as error:
        small(**options)
    assert "\n" not in str(error.value)
