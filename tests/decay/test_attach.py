"""decay.attach: models of other libraries with decayed shortcuts, against edited copies of their forwards."""

import copy
import io
import threading

import pytest
import timm
import torch
from foreign_models import DEPTH, MODELS, Case, hooks
from foreign_resnets import RESNETS, Residual, small_timm
from refusals import raises_user_error
from timm.models.resnet import BasicBlock
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.models import resnet18

from uvit_decay import decay

ALL = {**MODELS, **RESNETS}
SCHEDULES = {
    "linear": {"alpha_min": 0.7},
    "cosine": {"alpha_min": 0.7, "schedule": "cosine", "index": "v2"},
    "constant": {"alpha_min": 1.0, "schedule": "constant"},
    "constant-branch": {"alpha_min": 1.0, "schedule": "constant-branch"},
    "learnable": {"alpha_min": 0.7, "schedule": "learnable"},
}
OF_TRANSFORMERS = {
    "block": {"alpha_min": 0.6, "granularity": "block", "index": "v2"},
    "attention": {"alpha_min": 0.6, "branches": "attention"},
    "mlp": {"alpha_min": 0.6, "branches": "mlp", "index": "v1"},
}
SCHEDULED = [(name, options) for name in ALL for options in SCHEDULES.values()]
SCHEDULED += [(name, options) for name in MODELS for options in OF_TRANSFORMERS.values()]
DROPPED = {"embed_dim": 24, "depth": DEPTH, "num_heads": 2, "init_values": 0.5, "drop_path_rate": 0.5}
transformers = pytest.mark.parametrize("case", MODELS, indirect=True)


@pytest.fixture(params=ALL)
def case(request) -> Case:
    torch.manual_seed(0)
    return ALL[request.param]()


def gradients(model, out):
    return torch.autograd.grad(out.square().mean(), tuple(model.parameters()), allow_unused=True)


def assert_same_gradients(case, out, edited):
    for got, expected in zip(gradients(case.model, out), gradients(case.reference, edited), strict=True):
        torch.testing.assert_close(got, expected)


def test_alpha_one_registers_nothing_and_leaves_every_bit(case):
    with torch.no_grad():
        plain = case()
        attached = decay.attach(case.model, 1.0)
        assert hooks(case.model) == 0
        assert torch.equal(case(), plain)
    assert attached.alphas.tolist() == [1.0] * len(case.weights(1.0).alphas)


@pytest.mark.parametrize(("case", "options"), SCHEDULED, indirect=["case"])
def test_attached_equals_the_edited_forward_in_value_and_gradient(case, options):
    case.to(torch.float64)
    plain = case().detach()
    attached = decay.attach(case.model, **options)
    weights = case.weights(**options)
    assert attached.shortcuts == weights
    torch.testing.assert_close(attached.alphas.tolist(), list(weights.alphas), rtol=1e-6, atol=0)
    # Learned alphas are float32, as in our own networks.
    alphas = attached.alphas.tolist() if weights.learned else weights.alphas
    out, edited = case(), case.edited(alphas, weights.betas)
    torch.testing.assert_close(out, edited, rtol=1e-9, atol=1e-9)
    assert (out - plain).abs().max() > 1e-3
    assert_same_gradients(case, out, edited)
    attached.remove()
    assert hooks(case.model) == 0
    assert torch.equal(case(), plain)


@pytest.mark.parametrize(
    ("build", "training"),
    [
        (lambda: MODELS["timm"](timm.create_model("vit_small_patch16_224"), size=224), False),
        (lambda: Residual(resnet18()), True),
        (lambda: Residual(timm.create_model("resnet50")), False),
    ],
)
def test_published_networks_decay_all_their_branches(build, training):
    torch.manual_seed(0)
    case = build()
    case.model.train(training), case.reference.train(training)
    with torch.no_grad():
        plain = case()
        with decay.attach(case.model, 0.7):
            decayed = case()
        torch.testing.assert_close(decayed, case.edited(case.weights(0.7).alphas), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(decayed, plain, atol=1e-3)
        assert torch.equal(case(), plain)


@pytest.mark.parametrize(
    "build",
    [
        lambda: MODELS["timm"](VisionTransformer(32, 8, **DROPPED).train(), batch=8),
        lambda: Residual(small_timm(BasicBlock, drop_path_rate=0.5)),
    ],
    ids=["vit", "resnet"],
)
def test_stochastic_depth_and_layer_scale_belong_to_the_branch(build):
    torch.manual_seed(0)
    case = build()
    case.to(torch.float64)
    decay.attach(case.model, 0.7)
    torch.manual_seed(1)
    out = case()
    torch.manual_seed(1)
    edited = case.edited(case.weights(0.7).alphas)
    torch.testing.assert_close(out, edited, rtol=1e-9, atol=1e-9)
    assert_same_gradients(case, out, edited)


def test_state_dict_keeps_its_keys_and_loads_strictly_both_ways(case):
    before = copy.deepcopy(case.model.state_dict())
    attached = decay.attach(case.model, 0.7, schedule="learnable")
    after = case.model.state_dict()
    assert list(after) == list(before)
    case.model.load_state_dict(before)
    attached.remove()
    case.model.load_state_dict(after)


def test_learned_alphas_get_gradients_that_finite_differences_confirm(case):
    case.to(torch.float64)
    attached = decay.attach(case.model, 0.8, schedule="learnable").double()
    assert [name for name, _ in attached.named_parameters()] == ["alphas"]
    assert list(attached.state_dict()) == ["alphas"]
    (gradient,) = torch.autograd.grad(case().square().mean(), attached.alphas)
    for k in (0, 1, len(gradient) - 1):
        up, down = ([a + (i == k) * h for i, a in enumerate(attached.alphas.tolist())] for h in (1e-6, -1e-6))
        with torch.no_grad():
            slope = (case.edited(up).square().mean() - case.edited(down).square().mean()) / 2e-6
        torch.testing.assert_close(gradient[k], slope, rtol=1e-5, atol=1e-8)


@transformers
def test_a_model_that_was_compiled_is_compiled_anew_with_and_without_the_decay(case, request, exhaustive):
    """--exhaustive also compiles the models of timm and diffusers, which have the hooks of torch's."""
    if "torch" not in request.node.name and not exhaustive:
        pytest.skip("with --exhaustive")
    compiled = torch.compile(case.model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        plain = case(model=compiled)
    attached = decay.attach(case.model, 0.7)
    out, edited = case(model=compiled), case.edited(case.weights(0.7).alphas)
    torch.testing.assert_close(out, edited, rtol=1e-4, atol=1e-4)
    assert_same_gradients(case, out, edited)
    attached.remove()
    with torch.no_grad():
        assert torch.equal(case(model=compiled), plain)


@pytest.mark.parametrize("case", ["diffusers", "torch"], indirect=True)
def test_learned_alphas_are_inputs_of_a_compiled_model(case, request, exhaustive):
    """--exhaustive also compiles diffusers' model, which has the hooks of the test above."""
    if "diffusers" in request.node.name and not exhaustive:
        pytest.skip("with --exhaustive")
    attached = decay.attach(case.model, 0.7, schedule="learnable")
    compiled = torch.compile(case.model, backend="aot_eager", fullgraph=True)
    for shift in (0.0, 0.1):
        with torch.no_grad():
            attached.alphas += shift
        out, edited = case(model=compiled), case()
        torch.testing.assert_close(out, edited)
        got, expected = (torch.autograd.grad(value.square().mean(), attached.alphas)[0] for value in (out, edited))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_recompute_the_decay_and_let_it_go(case, reentrant):
    case.to(torch.float64)
    case.x.requires_grad_()  # the reentrant kind gives no gradients at all without
    attached = decay.attach(case.model, 0.7)
    edited = case.edited(case.weights(0.7).alphas)
    expected = gradients(case.reference, edited)
    for block in case.blocks():
        forward = type(block).__call__.__get__(block)
        block.__class__ = type("Recomputed", (type(block),), {})
        type(block).__call__ = lambda self, *a, forward=forward, **k: checkpoint(
            lambda *inner: forward(*inner, **k), *a, use_reentrant=reentrant
        )
    out = case()
    torch.testing.assert_close(out, edited)
    out.square().mean().backward()
    for p, gradient in zip(case.model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)
    assert all((h.state.x, h.state.v, h.state.count) == (None, None, 0) for h in attached.hooked)


def test_autocast_leaves_the_shortcut_in_its_precision(case):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        decay.attach(case.model, 0.7)
        out, edited = case(), case.edited(case.weights(0.7).alphas)
    assert out.dtype == edited.dtype
    torch.testing.assert_close(out.float(), edited.float(), rtol=0.05, atol=0.05)


def test_what_other_hooks_see_is_the_decayed_network(case):
    seen, decayed = [], []
    for block in case.blocks():
        block.register_forward_hook(lambda m, a, out: seen.append(out.clone()))
    decay.attach(case.model, 0.7)
    with torch.no_grad():
        case()
        case.edited(case.weights(0.7).alphas, states=decayed)
    for got, expected in zip(seen, decayed, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_copies_stay_decayed_and_can_be_removed_with_their_own_handle(case, copied):
    with torch.no_grad():
        plain = case()
        original = decay.attach(case.model, 0.7, schedule="learnable")
        if copied == "deepcopy":
            model, attached = copy.deepcopy((case.model, original))
        else:
            torch.save((case.model, original), file := io.BytesIO())
            file.seek(0)
            model, attached = torch.load(file, weights_only=False)
        decayed = case()
        assert torch.equal(case(model=model), decayed)
        attached.alphas.fill_(1.0)
        torch.testing.assert_close(case(model=model), plain)
        assert torch.equal(case(), decayed)
        attached.remove()
        assert torch.equal(case(model=model), plain)
        assert torch.equal(case(), decayed)


@transformers
def test_the_order_of_named_branches_is_checked_in_copies_until_it_is_removed_from_any_thread(case):
    original = decay.attach(case.model, 0.7, pairs=case.pairs)
    model, attached = copy.deepcopy((case.model, original))
    assert torch.equal(case(model=model), case())
    thread = threading.Thread(target=attached.remove)
    thread.start()
    thread.join()
    assert not hooks(model)
    assert hooks(case.model)
    decay.attach(model, 0.7, pairs=[*case.pairs[1:], case.pairs[0]])
    with raises_user_error("order"):
        case(model=copy.deepcopy(model))


@transformers
def test_threads_that_share_a_model_do_not_mix(case):
    decay.attach(case.model, 0.7)
    inner, outer = case(scale=1.0).detach(), {}
    block = case.blocks()[0]

    def another_call(module, args):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: outer.update(out=case(scale=-2.0).detach()))
            thread.start()
            thread.join()

    handle = (block.norm3 if block.norm2 is None else block.norm2).register_forward_pre_hook(another_call)
    assert torch.equal(case(scale=1.0), inner)
    handle.remove()
    assert torch.equal(outer["out"], case(scale=-2.0))


def test_an_error_in_the_middle_of_a_block_is_forgotten(case):
    decay.attach(case.model, 0.7)
    expected = case().detach()

    def fail(module, args):
        raise RuntimeError("stopped here")

    *_, last = (m for m in case.blocks()[1].modules() if isinstance(m, nn.Linear | nn.Conv2d))
    stop = last.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stopped here"):
        case()
    stop.remove()
    assert torch.equal(case(), expected)


class Branches(nn.Module):
    """x + f(x) for branches f that begin with their own norm."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(4))

    def forward(self, x):
        for branch in self.branches:
            x = x + branch(x)
        return x


def test_a_branch_may_be_a_single_module():
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(2, 4)
    outputs = []
    for first in (".0", ""):
        pairs = [(f"branches.{i}{first}", f"branches.{i}") for i in range(4)]
        with torch.no_grad(), decay.attach(model, 0.7, pairs=pairs):
            outputs.append(model(x))
    assert torch.equal(*outputs)
    assert not torch.allclose(outputs[0], model(x))


@pytest.mark.parametrize("case", [*MODELS, "torchvision-basic"], indirect=True)
def test_named_pairs_are_the_same_as_known_blocks(case):
    with torch.no_grad(), decay.attach(case.model, 0.7) as attached:
        assert f"{len(attached.alphas)} branches, alpha 1 .. 0.7, hooked" in repr(attached)
        known = case()
    with torch.no_grad(), decay.attach(case.model, 0.7, pairs=case.pairs):
        assert torch.equal(case(), known)


def test_padded_batches_in_eval_do_not_take_the_fused_path_around_the_hooks():
    case = MODELS["torch"]()
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[1, 4:] = True
    decay.attach(case.model, 0.7)
    with torch.no_grad():
        fused = case.model(case.x, src_key_padding_mask=mask)
    torch.testing.assert_close(fused, case.model(case.x, src_key_padding_mask=mask))
    assert not torch.allclose(fused, case.edited((1.0,) * 2 * DEPTH), atol=1e-3)
