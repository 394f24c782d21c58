"""U-ViT and SiT in each wiring, MAE and ViT, small, for the tests of what they have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import mae_reference
import pytest
import sit_reference
import torch
import uvit_reference
from torch import nn

from uvit_decay.nn import MAE, ViT
from uvit_decay.nn.block import AdaLNBlock, Block


@dataclass(frozen=True)
class Kind:
    """A network of depth 4 with 3 classes, for images of 16 patches."""

    name: str
    reference: ModuleType
    options: dict
    stages: tuple[str, ...]
    tokens: int

    @property
    def blocks(self):
        return len(self.stages)

    def small(self, **options):
        return self.reference.small(**self.options | options)

    def loaded(self, **options):
        return self.reference.loaded(**self.options | options)

    def random_state(self):
        return self.reference.random_state(**self.reference.SMALL | self.options)

    def inputs(self, **options):
        return self.reference.inputs(**self.reference.SMALL | self.options | options)


OF_UVIT = ("in_blocks.0", "in_blocks.1", "mid_block", "out_blocks.0", "out_blocks.1")
OF_DECAYED = ("enc_blocks.0", "enc_blocks.1", "dec_blocks.0", "dec_blocks.1")
UVIT = Kind("uvit", uvit_reference, dict(num_classes=3), OF_UVIT, tokens=2 + 16)
SIT = Kind("sit", sit_reference, dict(wiring="official"), tuple(f"blocks.{i}" for i in range(4)), tokens=16)
DECAYED_SIT = Kind("sit-decayed", sit_reference, dict(wiring="decayed"), OF_DECAYED, tokens=16)
CONCAT_SIT = Kind("sit-concat", sit_reference, dict(wiring="decayed", skip="concat"), OF_DECAYED, tokens=16)
each_kind = pytest.mark.parametrize("kind", [UVIT, SIT, DECAYED_SIT, CONCAT_SIT], ids=lambda kind: kind.name)


class Prediction(nn.Module):
    """An MAE without its mask."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, *arguments):
        return self.net(*arguments)[0]


@dataclass(frozen=True)
class Encoder:
    """An MAE or a ViT of depth 4 and its inputs."""

    name: str
    make: Callable[..., nn.Module]
    arguments: tuple

    def loaded(self, **options):
        torch.manual_seed(0)
        return self.make(**options)

    def inputs(self):
        return self.arguments


def mae(**options):
    return Prediction(MAE(**mae_reference.SMALL | dict(wiring="decayed", zero_init=False) | options))


def vit(**options):
    return ViT(**ENCODER, num_classes=5, **options)


ENCODER = {name: size for name, size in mae_reference.SMALL.items() if not name.startswith("decoder")}
IMAGES, NOISE = mae_reference.inputs(**mae_reference.SMALL)
KEEP = (torch.arange(2 * ENCODER["depth"])[:, None] % torch.tensor([2, 3, 5]) > 0).float() * 1.25  # some are dropped
MASKED, VIT = Encoder("mae", mae, (IMAGES, NOISE)), Encoder("vit", vit, (IMAGES, KEEP[:, : len(IMAGES)]))


def blocks_of(net):
    return [module for module in net.modules() if isinstance(module, Block | AdaLNBlock)]


def gradients(net, arguments):
    """Return the gradients of a loss for each parameter that is trained."""
    net(*arguments).square().mean().backward()
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.requires_grad}


def watch(net):
    """Return the first state, and the branches' inputs, outputs and merges, which the next forward pass fills in."""
    seen = {"inputs": [], "branches": [], "merges": [], "gates": [], "blocks": []}

    def keep(name):
        return lambda module, args, out: seen[name].append(out)

    def enter(module, args):
        seen["inputs"].append(args[0])

    for block in blocks_of(net)[: len(net.shortcuts.alphas) // 2]:  # without the decoder of an MAE
        gated = isinstance(block, AdaLNBlock)
        if gated:
            block.adaLN_modulation.register_forward_hook(keep("gates"))
        merge = block.skip if gated else block.skip_linear
        if merge is not None:
            merge.register_forward_hook(keep("merges"))
        for norm, branch in ((block.norm1, block.attn), (block.norm2, block.mlp)):
            norm.register_forward_pre_hook(enter)
            branch.register_forward_hook(keep("branches"))
        block.register_forward_hook(keep("blocks"))
    return seen


def sources_of(seen):
    """Return the first state, the branches times their gates, and the merges that `watch` has seen."""
    branches = list(seen["branches"])
    for i, modulation in enumerate(seen["gates"]):
        gates = modulation[:, None].chunk(6, dim=-1)[2::3]
        for branch in (0, 1):
            branches[2 * i + branch] = gates[branch] * branches[2 * i + branch]
    return torch.stack([seen["inputs"][0], *branches, *seen["merges"]])
