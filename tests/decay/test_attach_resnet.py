"""decay.attach on the ResNets of torchvision and timm, against edited copies of their forwards."""

from __future__ import annotations

import copy
import io

import pytest
import timm
import torch
from foreign_models import hooks
from foreign_resnets import MODELS, blocks_of, edited, randomised, small_timm
from timm.models.resnet import BasicBlock as TimmBasicBlock
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchvision.models import resnet18
from torchvision.models.resnet import BasicBlock, ResNet

from uvit_decay import decay
from uvit_decay.runtime.errors import UserError

SCHEDULES = {
    "linear": {"alpha_min": 0.7},
    "cosine": {"alpha_min": 0.7, "schedule": "cosine", "index": "v2"},
    "constant": {"alpha_min": 1.0, "schedule": "constant"},
    "constant-branch": {"alpha_min": 1.0, "schedule": "constant-branch"},
    "learnable": {"alpha_min": 0.7, "schedule": "learnable"},
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return randomised(MODELS[request.param]()).double()


@pytest.fixture
def x():
    return torch.randn(4, 3, 48, 48, generator=torch.Generator().manual_seed(1)).double()


def gradients(model, out):
    return torch.autograd.grad(out.square().mean(), tuple(model.parameters()))


def assert_same(model, out, reference, expected, **close):
    torch.testing.assert_close(out, expected, **close)
    for got, wanted in zip(gradients(model, out), gradients(reference, expected), strict=True):
        torch.testing.assert_close(got, wanted, **close)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("build", [resnet18, lambda: timm.create_model("resnet50")], ids=["resnet18", "resnet50"])
def test_the_published_networks(build, training):
    """torchvision's ResNet-18 and timm's ResNet-50: no bit changes at 1, the edited forward at 0.7, nothing stays."""
    torch.manual_seed(0)
    model = build().train(training)
    x, names = torch.randn(2, 3, 48, 48), list(model.state_dict())
    plain_copy, reference = copy.deepcopy(model), copy.deepcopy(model).double()
    with torch.no_grad():
        plain = copy.deepcopy(model)(x)
        attached = decay.attach(model, 1.0)
        assert hooks(model) == 0
        assert torch.equal(copy.deepcopy(model)(x), plain)
        attached.remove()
        weights = decay.shortcuts(blocks_of(model), 0.7, per_block=1)
        with decay.attach(model, 0.7) as attached:
            torch.testing.assert_close(attached.alphas, torch.tensor(weights.alphas))
            decayed = copy.deepcopy(model)
            torch.testing.assert_close(decayed(x), edited(copy.deepcopy(reference).float(), x, weights.alphas))
            assert not torch.allclose(decayed(x), plain, rtol=1e-2)
        assert hooks(model) == 0
        assert torch.equal(model(x), plain)
    assert list(model.state_dict()) == names
    decay.attach(plain_copy.double(), 0.7)
    out = plain_copy(x.double())
    assert_same(plain_copy, out, reference, edited(reference, x.double(), weights.alphas), rtol=1e-6, atol=1e-9)
    # Norms saw the same activations.
    for got, wanted in zip(plain_copy.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(got, wanted)


CASES = [*((name, True) for name in SCHEDULES), ("linear", False)]


@pytest.mark.parametrize(("schedule", "training"), CASES, ids=[f"{name}-{mode}" for name, mode in CASES])
def test_each_block_and_schedule_equals_the_edited_forward(model, x, schedule, training):
    options, reference = SCHEDULES[schedule], copy.deepcopy(model.train(training))
    plain = copy.deepcopy(model)(x).detach()
    attached = decay.attach(model, **options)
    weights = decay.shortcuts(blocks_of(model), **options, per_block=1)
    assert attached.shortcuts == weights
    alphas = attached.alphas.tolist() if weights.learned else weights.alphas
    expected = edited(reference, x, alphas, weights.betas)
    assert not torch.allclose(expected, plain, rtol=1e-3)
    assert_same(model, model(x), reference, expected, rtol=1e-9, atol=1e-12)


def test_blocks_are_decayed_in_the_order_of_their_execution(model, x):
    """An alpha of its own for each block: the order of modules is that of the forward."""
    ran = []
    attached = decay.attach(model, 0.7, schedule="learnable")
    for name, module in model.named_modules():
        if "downsample" not in name and name.endswith("conv1") and name != "conv1":
            module.register_forward_hook(lambda m, a, out, name=name: ran.append(name))
    model(x)
    assert ran == [hooked.norms[0] for hooked in attached.hooked]
    assert f"{len(ran)} branches, alpha 1 .. 0.7, hooked from 'layer1.0.conv1' to" in repr(attached)


def test_learned_alphas_get_gradients_that_finite_differences_confirm(model, x):
    model.eval()
    attached = decay.attach(model, 0.8, schedule="learnable").double()
    (gradient,) = torch.autograd.grad(model(x).square().mean(), attached.alphas)
    reference, step = copy.deepcopy(model), 1e-6
    with torch.no_grad():
        for k in range(len(gradient)):
            up, down = ([a + s * (i == k) for i, a in enumerate(attached.alphas.tolist())] for s in (step, -step))
            slope = (run_plain(reference, x, up) - run_plain(reference, x, down)) / (2 * step)
            torch.testing.assert_close(gradient[k], slope, rtol=1e-5, atol=1e-8)


def run_plain(model, x, alphas):
    """Loss of the edited forward; the hooks of the copy see none of its shortcuts' sums."""
    bare = copy.deepcopy(model)
    for module in bare.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return edited(bare, x, alphas).square().mean()


def test_stochastic_depth_drops_the_branch_and_never_the_shortcut(x):
    torch.manual_seed(0)
    model = randomised(small_timm(TimmBasicBlock, drop_path_rate=0.5)).double().train()
    reference = copy.deepcopy(model)
    decay.attach(model, 0.7)
    torch.manual_seed(1)
    out = model(x)
    torch.manual_seed(1)
    expected = edited(reference, x, decay.shortcuts(5, 0.7, per_block=1).alphas)
    assert_same(model, out, reference, expected, rtol=1e-9, atol=1e-12)


def test_autocast_computes_the_sum_in_the_precision_of_the_convolutions(x):
    model = randomised(MODELS["torchvision-basic"]()).eval()
    reference, x = copy.deepcopy(model), x.float()
    decay.attach(model, 0.7)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out, expected = model(x), edited(reference, x, decay.shortcuts(5, 0.7, per_block=1).alphas)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected.float(), rtol=0.05, atol=0.05)


def test_compiled_blocks_are_compiled_anew_with_and_without_the_decay():
    torch.manual_seed(0)
    whole = randomised(MODELS["torchvision-basic"]()).eval()
    model, x = nn.Sequential(whole.layer1[1], whole.layer2[0]), torch.randn(2, 8, 6, 6)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        plain = compiled(x)
        attached = decay.attach(model, 0.7, "learnable")
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(compiled(x), plain, rtol=1e-2)
        attached.remove()
        assert torch.equal(compiled(x), plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_recompute_the_decay(model, x, reentrant):
    x.requires_grad_()
    reference = copy.deepcopy(model.eval())
    attached = decay.attach(model, 0.7)
    expected = edited(reference, x, decay.shortcuts(blocks_of(model), 0.7, per_block=1).alphas)
    for i in (1, 2, 3, 4):
        stage = getattr(model, f"layer{i}")
        stage.forward = lambda x, stage=stage: checkpoint(
            lambda x: nn.Sequential.forward(stage, x), x, use_reentrant=reentrant
        )
    out = model(x)
    torch.testing.assert_close(out, expected)
    out.square().mean().backward()
    wanted = gradients(reference, expected)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert all((h.state.x, h.state.v, h.state.count) == (None, None, 0) for h in attached.hooked)


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_copies_stay_decayed_and_have_their_own_handle(model, x, copied):
    with torch.no_grad():
        plain = model.eval()(x)
        original = decay.attach(model, 0.7)
        if copied == "deepcopy":
            twin, attached = copy.deepcopy((model, original))
        else:
            torch.save((model, original), file := io.BytesIO())
            file.seek(0)
            twin, attached = torch.load(file, weights_only=False)
        decayed = model(x)
        assert torch.equal(twin(x), decayed)
        attached.remove()
        assert torch.equal(twin(x), plain)
        assert torch.equal(model(x), decayed)


def test_several_devices_wrap_it(x, tmp_path):
    torch.manual_seed(0)
    model = MODELS["torchvision-basic"]()
    reference = copy.deepcopy(model)
    decay.attach(model, 0.7)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        DistributedDataParallel(model)(x.float()).square().mean().backward()
    finally:
        torch.distributed.destroy_process_group()
    expected = gradients(reference, edited(reference, x.float(), decay.shortcuts(5, 0.7, per_block=1).alphas))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_named_blocks_are_the_same_as_known_ones(x):
    torch.manual_seed(0)
    model = MODELS["torchvision-basic"]().double().eval()
    names = ["layer1.0", "layer1.1", "layer2.0", "layer3.0", "layer4.0"]
    projections = [None, None, *(f"{name}.downsample" for name in names[2:])]
    pairs = [
        decay.Single(f"{name}.conv1", f"{name}.bn2", projection)
        for name, projection in zip(names, projections, strict=True)
    ]
    with torch.no_grad(), decay.attach(model, 0.7):
        known = model(x)
    with torch.no_grad(), decay.attach(model, 0.7, pairs=pairs):
        assert torch.equal(model(x), known)


@pytest.mark.parametrize("options", [{"granularity": "block"}, {"branches": "attention"}, {"branches": "mlp"}])
def test_what_makes_no_sense_in_a_resnet_is_refused(options):
    model = MODELS["torchvision-basic"]()
    with pytest.raises(UserError, match="one residual branch.*leave out granularity and branches"):
        decay.attach(model, 0.7, **options)
    assert hooks(model) == 0


def test_a_mix_of_transformer_and_resnet_is_refused():
    model = nn.ModuleList([MODELS["torchvision-basic"](), nn.TransformerEncoderLayer(8, 2, norm_first=True)])
    with pytest.raises(UserError, match="attach to one of the parts"):
        decay.attach(model, 0.7)
    assert hooks(model) == 0
    decay.attach(model[0], 0.7)


@pytest.mark.parametrize(
    ("last", "projection", "message"),
    [
        (
            "layer2.0.bn2",
            "layer3.0.downsample",
            "'layer3.0.downsample' gives no tensor of the shape that 'layer2.0.bn2'",
        ),
        ("layer2.0.bn2", "fc", "gives no tensor"),
        ("layer4.0.bn2", "layer2.0.downsample", "gives no tensor"),
        ("layer2.0.nothing", "layer2.0.downsample", "no module 'layer2.0.nothing'"),
        ("layer2.0.bn2", "layer1.0", "ran after 0 of the calls"),
    ],
)
def test_wrong_names_are_refused(last, projection, message, x):
    model = MODELS["torchvision-basic"]()
    pairs = [decay.Single("layer2.0.conv1", last, projection)]
    if "no module" in message:
        with pytest.raises(UserError, match=message):
            decay.attach(model, 0.7, pairs=pairs)
        return
    decay.attach(model, 0.7, index="v2", pairs=pairs)
    with pytest.raises(UserError, match=message):
        model(x.float())


def test_a_branch_that_ends_in_no_tensor_is_refused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.projection = nn.Linear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.first(x))[0] + self.projection(x)

    block = Two()
    decay.attach(block, 0.7, index="v2", pairs=[decay.Single("first", "last", "projection")])
    with pytest.raises(UserError, match="'last' gives no tensor"):
        block(torch.zeros(3, 4))


def test_subclasses_with_another_forward_are_not_known():
    class Other(BasicBlock):
        def forward(self, x):
            return x

    with pytest.raises(UserError, match="knows no block of ResNet"):
        decay.attach(ResNet(Other, [1, 1, 1, 1]), 0.7)
