"""Our networks alike in use: checkpointing of activations, the null label, compilation, taps and user errors."""

import inspect
import math

import jaxtyping
import pytest
import torch
from networks import CONCAT_SIT, DECAYED_SIT, MASKED, SIT, UVIT, VIT, blocks_of, each_kind, gradients, mae
from refusals import raises_user_error

from uvit_decay.nn import MAE, ResNet, SiT, UViT, ViT
from uvit_decay.nn.intermediates import HasIntermediates, pooled
from uvit_decay.nn.mae import Masking
from uvit_decay.nn.sizes import create_model


@pytest.mark.parametrize("kind", [UVIT, SIT, DECAYED_SIT, CONCAT_SIT, MASKED, VIT], ids=lambda kind: kind.name)
@pytest.mark.parametrize("schedule", ["linear", "learnable"])
def test_recomputed_activations_give_identical_loss_and_gradients(schedule, kind):
    options = dict(alpha_min=0.7, schedule=schedule)
    plain, recomputed = kind.loaded(**options), kind.loaded(**options, checkpointing=True)
    assert torch.equal(plain(*kind.inputs()), recomputed(*kind.inputs()))
    calls = []
    blocks_of(recomputed)[1].register_forward_pre_hook(lambda *_: calls.append(1))
    expected, actual = gradients(plain, kind.inputs()), gradients(recomputed, kind.inputs())
    assert expected.keys() == actual.keys()
    assert len(calls) == 2
    for name, gradient in expected.items():
        assert gradient is not None, name
        assert torch.equal(gradient, actual[name]), name
    gradients(recomputed.eval(), kind.inputs())
    assert len(calls) == 3, "in training only"


@each_kind
def test_no_labels_means_the_null_label(kind):
    net = kind.loaded()
    x, t, labels = kind.inputs()
    assert torch.equal(net(x, t), net(x, t, torch.full((3,), 3)))
    assert not torch.allclose(net(x, t), net(x, t, labels))


@each_kind
def test_a_network_without_null_label_asks_for_classes(kind):
    assert not kind.small(num_classes=0).null_label
    net = kind.loaded(null_label=False)
    x, t, labels = kind.inputs()
    assert net(x, t, labels).shape == x.shape
    with raises_user_error("null label"):
        net(x, t)
    with raises_user_error("null label"):
        next(net.forward_intermediates(x, t))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (UVIT, dict(schedule="learnable", output_skip="learned")),
        (DECAYED_SIT, dict(output_skip="learned")),
        (SIT, dict(schedule="learnable", num_classes=0)),
        (MASKED, dict(schedule="learnable", depth=2, decoder_depth=1)),
        (VIT, dict(schedule="learnable")),
    ],
)
def test_compiled_network_is_one_graph_that_equals_eager_and_can_be_tapped(kind, options, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace the checks of the tests
    monkeypatch.setattr(Masking, "mask", property(inspect.unwrap(Masking.mask.fget)))  # nor their wrapper of it
    if kind in (MASKED, VIT):
        net, arguments = kind.loaded(**options, alpha_min=0.7), kind.inputs()
    else:
        net, arguments = kind.loaded(**options, alpha_min=0.7, depth=2), kind.inputs(**options)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), net(*arguments), atol=1e-6, rtol=1e-5)
    compiled(*arguments).square().mean().backward()
    actual = {name: parameter.grad.clone() for name, parameter in net.named_parameters() if parameter.requires_grad}
    net.zero_grad()
    for name, gradient in gradients(net, arguments).items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-6, rtol=1e-4)
    if kind not in (MASKED, VIT):
        states = (tapped.forward_intermediates(*arguments[:2]) for tapped in (compiled, net))
        assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


@each_kind
def test_each_state_of_the_trunk_is_the_output_of_the_module_that_its_stage_names(kind):
    net, seen = kind.loaded(alpha_min=0.7), {}
    for stage in net.layers[1:]:
        module = net.get_submodule(stage.name)
        module.register_forward_hook(lambda *call, name=stage.name: seen.setdefault(name, call[-1]))
    states = list(net.forward_intermediates(*kind.inputs()))
    assert isinstance(net, HasIntermediates)
    assert [stage.name for stage in net.layers] == ["embeddings", *kind.stages]
    middle = ["middle"] * (kind is UVIT)
    assert [stage.kind for stage in net.layers] == ["embeddings", *["encoder"] * 2, *middle, *["decoder"] * 2]
    assert list(seen) == list(kind.stages)
    for state, output in zip(states[1:], seen.values(), strict=True):
        assert state.shape == (3, kind.tokens, 16)
        assert torch.equal(state, output)


@each_kind
@pytest.mark.parametrize("num_classes", [0, 3])
def test_states_are_those_of_the_null_label_and_patches_are_their_last_tokens(num_classes, kind):
    net = kind.loaded(alpha_min=0.7, num_classes=num_classes)
    x, t, _ = kind.inputs()
    null = torch.full((3,), num_classes) if num_classes else None
    with torch.no_grad():
        pairs = zip(net.forward_intermediates(x, t), net.forward_intermediates(x, t, null), strict=True)
        for state, expected in pairs:
            assert torch.equal(state, expected)
            mean = sum(state[:, token] for token in range(-16, 0)) / 16
            torch.testing.assert_close(pooled(state, "mean", net.num_prefix_tokens), mean, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("network", [UViT, SiT, MAE, ViT, ResNet])
def test_only_train_py_takes_sizes_from_the_data(network):
    with raises_user_error("channels", "None", "train.py"):
        network(channels=None)


BAD_SCALES = ("steep", 0.0, math.inf, "kappa:half", "kappa:", "kappa:1.5", "kappa:0", "learned:2", "stream:", "stream")


@pytest.mark.parametrize(
    ("make", "options", "named"),
    [
        *((kind.small, dict(depth=0), "depth") for kind in (UVIT, SIT, DECAYED_SIT)),
        *((kind.small, dict(depth=3), "depth") for kind in (UVIT, DECAYED_SIT)),
        *((kind.small, dict(image_size=9), "image_size 9") for kind in (UVIT, SIT)),
        *((kind.small, dict(patch_size=3), "patch_size 3") for kind in (UVIT, SIT)),
        *((kind.small, dict(heads=3), "heads 3") for kind in (UVIT, SIT)),
        *((kind.small, dict(alpha_min=0.0), "alpha_min") for kind in (UVIT, SIT)),
        *((kind.small, dict(norm_type="batch"), ("norm_type", "layer", "rms", "'batch'")) for kind in (UVIT, SIT)),
        *((kind.small, dict(output_skip="on"), ("output_skip", "none", "learned", "'on'")) for kind in (UVIT, SIT)),
        (UVIT.small, dict(init="kaiming"), ("init", "official", "xavier", "'kaiming'")),
        (SIT.small, dict(patch_size=0), "patch_size"),
        (SIT.small, dict(num_classes=-1), "num_classes"),
        (SIT.small, dict(dim=18), ("dim 18", 4)),
        (SIT.small, dict(skip="concat"), ("skip", "decayed")),
        (SIT.small, dict(skip_zero_init=True), ("skip_zero_init", "decayed")),
        (SIT.small, dict(time="ddpm"), ("time", "sit", "dit", "'ddpm'")),
        (SIT.small, dict(learned_variance=True), "learn_sigma"),
        (SIT.small, dict(wiring="unet"), ("wiring", "official", "decayed", "'unet'")),
        (DECAYED_SIT.small, dict(skip="mul"), ("skip", "add", "concat", "'mul'")),
        (UVIT.small, dict(mlp="relu"), ("mlp", "gelu", "swiglu", "'relu'")),
        *((UVIT.small, dict(skip_scale=scale), "skip_scale") for scale in BAD_SCALES),
        (UVIT.small, dict(skip_scale="learned", patch_size=4, image_size=8), "skip_scale"),  # too few tokens
        (UVIT.small, dict(skip_scale="stream", alpha_min=0.7), "skip_scale"),
        (UVIT.small, dict(skip_scale="stream:0.8", alpha_min=0.7), "skip_scale"),
        (UVIT.small, dict(skip_scale="stream:0.8", schedule="learnable"), "skip_scale"),
        (UVIT.small, dict(skip_scale="kappa", skip=False), "skip_scale"),
        (SIT.small, dict(skip_scale=0.5), "skip_scale"),
        (mae, dict(wiring="official", skip_scale="stream:0.8"), "skip_scale"),
        (mae, dict(skips=False), "image"),
        (mae, dict(norm=True), "norm"),
        (mae, dict(depth=3), "even"),
        (mae, dict(channels=1), "`pixels` to unit"),
        (mae, dict(image_size=9), "patch_size"),
        (mae, dict(decoder_depth=0), "decoder_depth"),
        (mae, dict(patch_size=1, channels=1, pixels="unit"), "variance"),
        (ResNet, dict(depth=6), "depth"),
        (ResNet, dict(pixels="imagenet", channels=1), "`pixels` to unit"),
    ],
)
def test_impossible_networks_are_user_errors_of_one_line_that_name_the_option(make, options, named, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # whose checks of types would come first
    with raises_user_error(named):
        make(**options)


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        (UVIT, "uvit-s/2", dict(image_size=32, channels=3, num_classes=10)),
        (DECAYED_SIT, "sit-s/4", dict(num_classes=10, wiring="decayed")),
    ],
)
def test_published_weights_of_the_real_width_give_the_published_function(kind, name, options):
    net = create_model(name, depth=4, **options)
    state, (x, t, y) = kind.reference.random_state(**net.config), kind.reference.inputs(**net.config, count=1)
    net.load_state_dict(state, strict=True)
    with torch.no_grad():
        expected = kind.reference.official_forward(state, x, t if kind is UVIT else 1 - t, y, **net.config)
        torch.testing.assert_close(net(x, t, y), expected, atol=1e-5 * float(expected.std()), rtol=1e-5)
