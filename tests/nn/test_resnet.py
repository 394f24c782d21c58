"""Our ResNet against torchvision's, plain and with decay.attach; its depth, its stems, what it refuses."""

import copy
import math

import pytest
import torch
from foreign_resnets import Residual
from refusals import raises_user_error
from torch import nn
from torchvision.models import resnet18
from torchvision.models.resnet import BasicBlock
from torchvision.models.resnet import ResNet as Torchvision
from torchvision.transforms import Normalize

from uvit_decay import decay
from uvit_decay.nn import ResNet
from uvit_decay.nn.intermediates import HasIntermediates

SMALL = {"image_size": 16, "width": 8, "num_classes": 5, "stem": "cifar"}
TO_IMAGENET = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def official(depth=8):
    """torchvision's network with norms that differ from the identity, as trained ones do."""
    torch.manual_seed(0)
    return Residual(Torchvision(BasicBlock, [2, 2, depth - 6, 2])).model


def images(size=40, count=2):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_official_weights_load_and_give_the_same_logits(training):
    theirs = resnet18().train(training)
    theirs.load_state_dict(official().state_dict())
    net = ResNet(image_size=40, num_classes=1000).train(training)
    net.load_state_dict(theirs.state_dict())
    x = images()
    ours = net(x)
    torch.testing.assert_close(ours, theirs(TO_IMAGENET((x + 1) / 2)), rtol=1e-5, atol=1e-5)
    assert [*net.state_dict()] == ["alphas", *theirs.state_dict()]
    assert sum(p.numel() for p in net.parameters()) == 11_689_512
    theirs.load_state_dict({name: value for name, value in net.state_dict().items() if name != "alphas"})


@pytest.mark.parametrize(
    "options",
    [dict(alpha_min=0.7, index="v2"), dict(alpha_min=0.7, schedule="learnable"), dict(schedule="constant-branch")],
)
def test_a_decayed_and_deeper_network_is_torchvisions_with_attached_decay(options):
    theirs = official(depth=9).double()
    net = ResNet(image_size=40, num_classes=1000, depth=9, pixels="unit", **options).double()
    net.load_state_dict(theirs.state_dict())
    attached = decay.attach(theirs, **{"alpha_min": 1.0} | options).double()
    x = images().double()
    torch.testing.assert_close(net(x), theirs(x))
    ours = torch.autograd.grad(net(x).square().mean(), [p for p in net.parameters() if p is not net.alphas])
    wanted = torch.autograd.grad(theirs(x).square().mean(), list(theirs.parameters()))
    for got, expected in zip(ours, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)
    if "learnable" in options.values():
        parameters = (net.alphas, attached.alphas)
        grads = [
            torch.autograd.grad(f(x).square().mean(), alphas)[0]
            for f, alphas in zip((net, theirs), parameters, strict=True)
        ]
        torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-9)


def test_its_features_are_what_the_classifier_reads():
    net = ResNet(**SMALL).eval()
    assert isinstance(net, HasIntermediates)
    assert [layer.name for layer in net.layers] == ["avgpool"]
    seen = []
    net.avgpool.register_forward_hook(lambda m, a, out: seen.append(out))
    x = images(16, 3)
    (features,) = net.forward_intermediates(x)
    assert features.shape == (3, 1, net.dim) == (3, 1, 64)
    torch.testing.assert_close(features[:, 0], seen[0].flatten(1))
    torch.testing.assert_close(net(x), net.linear_head(features[:, 0]))


@pytest.mark.parametrize(("stem", "side"), [("cifar", 16), ("imagenet", 4)])
def test_the_stems(stem, side):
    net = ResNet(**{**SMALL, "stem": stem})
    seen = []
    net.blocks()[0].register_forward_pre_hook(lambda m, args: seen.append(args[0].shape))
    net(images(16))
    assert seen == [(2, 8, side, side)]


def test_any_channels_and_sizes_without_a_classifier():
    net = ResNet(image_size=20, channels=2, width=8, stem="cifar", pixels="unit")
    assert next(net.forward_intermediates(torch.zeros(2, 2, 20, 20))).shape == (2, 1, 64)
    with raises_user_error("num_classes"):
        net(torch.zeros(2, 2, 20, 20))


def test_zero_init_silences_the_branches():
    net = ResNet(**SMALL, zero_init=True)
    assert all(not block.bn2.weight.any() for block in net.blocks())
    assert all(block.bn2.weight.any() for block in ResNet(**SMALL, alpha_min=0.7).blocks())


def test_weights_of_another_decay_are_refused():
    net = ResNet(**SMALL, alpha_min=0.7)
    with raises_user_error("alphas"):
        ResNet(**SMALL).load_state_dict(net.state_dict())


def test_it_computes_in_bfloat16_and_returns_single_precision():
    net = ResNet(**SMALL, alpha_min=0.7).eval()
    x = images(16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = net(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, net(x), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 6}, "depth"),
        ({"width": 0}, "width"),
        ({"alpha_min": 0.0}, "alpha_min"),
        ({"pixels": "imagenet", "channels": 1}, "pixels unit"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with raises_user_error(message):
        ResNet(**SMALL | options)


def without_eps(net):
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-14  # torch refuses 0
    return net.double()


@pytest.mark.parametrize("training", [True, False])
def test_gains_begin_again_at_projected_shortcuts(training):
    """conv and batch norm forget the scale of the stream, so that P is 1 before each projection."""
    options = SMALL | {"depth": 9, "alpha_min": 0.6, "pixels": "unit"}
    torch.manual_seed(0)
    decayed, gained = (without_eps(ResNet(**options, schedule=schedule)) for schedule in ("linear", "gain"))
    assert decayed.shortcuts.restarts == gained.shortcuts.restarts == (2, 4, 7)
    weights = {name: value for name, value in decayed.state_dict().items() if name not in ("alphas", "betas")}
    gained.load_state_dict(gained.state_dict() | weights)
    x = images(16, 4).double()
    for net in (decayed, gained):
        net.train()
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0  # statistics of this batch, for evaluation
        net.pooled(x)
        net.train(training)
    alphas = decayed.shortcuts.alphas
    torch.testing.assert_close(decayed.pooled(x) / math.prod(alphas[7:]), gained.pooled(x), rtol=1e-8, atol=1e-11)
    logits = [net(x) for net in (decayed, gained)]
    torch.testing.assert_close(*logits, rtol=1e-8, atol=1e-11)
    slopes = []
    for net, output in zip((decayed, gained), logits, strict=True):
        slopes.append(torch.autograd.grad(output.square().sum(), [*net.parameters()]))
    for ours, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    assert gained.shortcuts.betas[7] == pytest.approx(1 / alphas[7])
    assert decayed.shortcuts.gains == pytest.approx(gained.shortcuts.gains)


def test_gains_of_files_without_a_factor_of_the_classifier_keep_their_function():
    """Version 0.2.0 before the factor: the classifier read the features undivided. Official files take the factor."""
    torch.manual_seed(0)
    options = SMALL | {"alpha_min": 0.6, "schedule": "gain"}
    net = ResNet(**options).eval()
    assert net.fc.factor == pytest.approx(1 / net.shortcuts.betas[-1])
    x = images(16)
    earlier = net.state_dict()
    del earlier["fc.scale"]
    undivided = nn.functional.linear(net.pooled(x), net.fc.weight, net.fc.bias)
    assert not torch.allclose(net(x), undivided, rtol=0.05)
    old, again = ResNet(**options).eval(), ResNet(**options).eval()
    old.load_state_dict(earlier)
    again.load_state_dict(old.state_dict())
    for each in (old, again, copy.deepcopy(again)):
        torch.testing.assert_close(each(x), undivided)
        assert each.head_gains() == {"fc.weight": 1.0}
    old.load_state_dict(net.bfloat16().state_dict())
    assert old.fc.factor == net.fc.factor
    official_file = {name: value for name, value in ResNet(**SMALL).state_dict().items() if name != "alphas"}
    again.load_state_dict(official_file)
    assert again.fc.factor == net.fc.factor
    with raises_user_error("classifier", "alpha_min"):
        old.load_state_dict(earlier | {"fc.scale": torch.tensor(0.9)})
