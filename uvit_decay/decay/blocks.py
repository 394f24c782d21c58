"""Blocks that `attach` can decay: the names of their modules, and a table of supported classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from uvit_decay.decay.hooks import HookedBranches, HookedGates, HookedPair, HookedProjection
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import check_types


@check_types
@dataclass(frozen=True)
class Gated:
    """Names of a block whose branches end in a product with a gate, not in a module.

    `block` is its name in the model; `norms` are the names, within the block, of the first module of each branch, in
    execution order.
    """

    block: str
    norms: tuple[str, ...]

    def build_branches(self) -> HookedBranches:
        """Return the branches of the block, without hooks yet."""
        if not self.norms:
            raise UserError(f"Gated({self.block!r}, ()) has no branch: name the first module of each")
        norms = [_join(self.block, norm) for norm in self.norms]
        return HookedGates(norms, self.block)


@check_types
@dataclass(frozen=True)
class Single:
    """Names of a block with a single residual branch, as a ResNet's: y = relu(shortcut(x) + f(x)).

    `first` and `last` are the modules that the branch calls first, with x, and last. `projection` is the shortcut if it
    is a module, called with x after the branch; None is the identity.
    """

    first: str
    last: str
    projection: str | None = None

    def build_branches(self) -> HookedBranches:
        """Return the branch of the block, without hooks yet."""
        if self.projection is None:
            return HookedPair(self.first, self.last)
        return HookedProjection(self.first, self.last, self.projection)


# A pair names the modules that a branch calls first, with x, and last.
Pairs = Sequence[tuple[str, str] | Gated | Single]


def _timm_block(name: str, block: nn.Module) -> Pairs:
    return [(_join(name, f"norm{i}"), _join(name, f"drop_path{i}")) for i in (1, 2)]


def _torch_layer(name: str, layer: nn.Module) -> Pairs:
    if not layer.norm_first:
        raise UserError(
            "this TransformerEncoderLayer norms after the sum, which undoes a decay; build it with norm_first=True"
        )
    return [(_join(name, f"norm{i}"), _join(name, f"dropout{i}")) for i in (1, 2)]


def _diffusers_block(name: str, block: nn.Module) -> Pairs:
    if block.norm_type != "ada_norm_zero" or block.attn2 is not None:
        raise UserError("decay.attach knows diffusers' BasicTransformerBlock only in DiT (ada_norm_zero); give `pairs`")
    return [Gated(name, ("norm1", "norm3"))]


def _resnet_block(name: str, block: nn.Module, ends: tuple[str, ...]) -> Pairs:
    """Return the branch of a ResNet's block; it ends with the first of the modules `ends` that is not None."""
    last = next(end for end in ends if getattr(block, end) is not None)
    projection = None
    if block.downsample is not None:
        projection = _join(name, "downsample")
    return [Single(_join(name, "conv1"), _join(name, last), projection)]


# Classes by name, so that no library is imported. The names of a block's modules would not identify it: timm's
# ResPostBlock has the modules of Block in another wiring.
_KNOWN: dict[str, Callable[[str, nn.Module], Pairs]] = {
    "timm.models.vision_transformer.Block": _timm_block,
    "torch.nn.modules.transformer.TransformerEncoderLayer": _torch_layer,
    "diffusers.models.attention.BasicTransformerBlock": _diffusers_block,
    "torchvision.models.resnet.BasicBlock": partial(_resnet_block, ends=("bn2",)),
    "torchvision.models.resnet.Bottleneck": partial(_resnet_block, ends=("bn3",)),
    "timm.models.resnet.BasicBlock": partial(_resnet_block, ends=("drop_path", "se", "bn2")),
    "timm.models.resnet.Bottleneck": partial(_resnet_block, ends=("drop_path", "se", "bn3")),
}


def known_pairs(model: nn.Module) -> Pairs:
    """Return the branches of all supported blocks, in the order of the model's modules; a UserError if it has none."""
    pairs: list[tuple[str, str] | Gated | Single] = []
    for name, block in model.named_modules():
        for cls in type(block).__mro__:
            pairs_of = _KNOWN.get(f"{cls.__module__}.{cls.__qualname__}")
            # A subclass with another forward may wire its branches differently, so it is not supported.
            if pairs_of is not None and type(block).forward is cls.forward:
                pairs += pairs_of(name, block)
    if not pairs:
        example = "pairs=[('blocks.0.norm1', 'blocks.0.drop_path1'), ...]"
        raise UserError(f"decay.attach knows no block of {type(model).__name__}; name its branches, {example}")
    return pairs


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}".strip(".")
