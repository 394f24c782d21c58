"""Small ResNets of torchvision and timm, each with a copy of its forward in which the shortcuts are edited."""

from __future__ import annotations

import torch
from foreign_models import Case
from timm.layers import BlurPool2d
from timm.models.resnet import BasicBlock as TimmBasicBlock
from timm.models.resnet import Bottleneck as TimmBottleneck
from timm.models.resnet import ResNet as TimmResNet
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from uvit_decay import decay


def tv_branch(block, x):
    out = block.bn1(block.conv1(x)).relu()
    if isinstance(block, BasicBlock):
        return block.bn2(block.conv2(out))
    return block.bn3(block.conv3(block.bn2(block.conv2(out)).relu()))


def timm_branch(block, x):
    out = block.conv1(x)
    if isinstance(block, TimmBottleneck):
        out = block.conv3(block.aa(block.bn2(block.conv2(block.bn1(out).relu())).relu()))
        out = block.bn3(out)
    else:
        out = block.bn2(block.conv2(block.aa(block.bn1(out).relu())))
    out = out if block.se is None else block.se(out)
    return out if block.drop_path is None else block.drop_path(out)


class Small(ResNet):
    """torchvision's network with blocks of an eighth of their channels."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__(block, [2, 1, 1, 1])
        self.fc = nn.Linear(self.inplanes, 7)

    def _make_layer(self, block, planes, *args, **options):
        return super()._make_layer(block, planes // 8, *args, **options)


def small_timm(block, **options):
    return TimmResNet(block, (2, 1, 1, 1), num_classes=7, channels=(8, 16, 16, 32), **options)


class Residual(Case):
    """A ResNet in training, whose norms differ from the identity: no branch is silent, and running means matter."""

    per_block = 1

    def __init__(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor in (module.weight, module.bias):
                    nn.init.normal_(tensor, 0.3, 0.3)
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 2)
        super().__init__(model.train(), torch.randn(4, 3, 48, 48))

    def blocks(self, model: nn.Module | None = None) -> list[nn.Module]:
        model = self.model if model is None else model
        return [*model.layer1, *model.layer2, *model.layer3, *model.layer4]

    def edited(self, alphas, betas=None, states=None) -> Tensor:
        """Compute the forward pass with relu(alpha * shortcut(x) + beta * f(x))."""
        model, betas = self.reference, betas or (1.0,) * len(alphas)
        timms = isinstance(model, TimmResNet)
        branch = timm_branch if timms else tv_branch
        x = model.maxpool(model.bn1(model.conv1(self.x)).relu())
        for block, alpha, beta in zip(self.blocks(model), alphas, betas, strict=True):
            shortcut = x if block.downsample is None else block.downsample(x)
            x = (alpha * shortcut + beta * branch(block, x)).relu()
            if states is not None:
                states.append(x)
        return model.forward_head(x) if timms else model.fc(model.avgpool(x).flatten(1))


class Basic(Residual):
    """The case of torchvision's basic blocks."""

    def __init__(self) -> None:
        super().__init__(Small(BasicBlock))
        names = ["layer1.0", "layer1.1", "layer2.0", "layer3.0", "layer4.0"]
        self.pairs = [
            decay.Single(f"{name}.conv1", f"{name}.bn2", None if name == "layer1.1" else f"{name}.downsample")
            for name in names
        ]


RESNETS = {
    "torchvision-basic": Basic,
    "torchvision-bottleneck": lambda: Residual(Small(Bottleneck)),
    "timm-basic": lambda: Residual(small_timm(TimmBasicBlock)),
    "timm-bottleneck": lambda: Residual(small_timm(TimmBottleneck)),
    "timm-se-aa": lambda: Residual(small_timm(TimmBasicBlock, aa_layer=BlurPool2d, block_args={"attn_layer": "se"})),
}
