"""Our ResNet against torchvision's, plain and with decay.attach; its depth, its stems, what it refuses."""

import pytest
import torch
from foreign_resnets import Residual
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


def test_zero_init_silences_the_branches():
    net = ResNet(**SMALL, zero_init=True)
    assert all(not block.bn2.weight.any() for block in net.blocks())
    assert all(block.bn2.weight.any() for block in ResNet(**SMALL, alpha_min=0.7).blocks())


def test_it_computes_in_bfloat16_and_returns_single_precision():
    net = ResNet(**SMALL, alpha_min=0.7).eval()
    x = images(16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = net(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, net(x), rtol=0.1, atol=0.1)
