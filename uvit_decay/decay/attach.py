"""`attach`: decayed shortcuts for transformers of other libraries, and the table of supported blocks.

The hooks themselves are in `uvit_decay.decay.hooks`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from uvit_decay.decay.hooks import HookedBranches, HookedGates, HookedPair
from uvit_decay.decay.schedule import Branches, Granularity, Index, Schedule, Shortcuts, shortcuts
from uvit_decay.runtime.errors import UserError


@dataclass(frozen=True)
class Gated:
    """Names of a block whose branches end in a product with a gate, not in a module.

    `block` is its name in the model; `norms` are the names, within the block, of the first module of each branch, in
    execution order.
    """

    block: str
    norms: tuple[str, ...]


Pairs = Sequence[tuple[str, str] | Gated]


class Attached(nn.Module):
    """Decay attached to a model; `remove()` or the end of a `with` block detaches it.

    `alphas` (2 L) are a buffer, or a parameter if `learnable`. They are not in the model, whose state_dict keeps its
    keys: train, save and move this module together with the model (under DDP, wrap one module that holds both).
    """

    alphas: Tensor

    def __init__(self, weights: Shortcuts, device: torch.device) -> None:
        super().__init__()
        self.shortcuts = weights
        self.hooked: list[HookedBranches] = []
        alphas = torch.tensor(weights.alphas, device=device)
        if weights.learnable:
            self.alphas = nn.Parameter(alphas)
        else:
            self.register_buffer("alphas", alphas, persistent=False)

    def weights(self, k: int) -> tuple[float | Tensor, float]:
        """Return alpha and beta of branch k."""
        return (self.alphas if self.shortcuts.learnable else self.shortcuts.alphas)[k], self.shortcuts.betas[k]

    def remove(self) -> None:
        """Remove all hooks; the model then computes exactly what it did before."""
        for hooked in self.hooked:
            hooked.remove()
        if self.hooked:
            _forget_graphs()
        self.hooked.clear()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def extra_repr(self) -> str:
        """Return a summary for repr: the number of branches, the alphas, and the first and the last hooked norm."""
        count, alphas = len(self.alphas), self.alphas.tolist()
        where = f", hooked from {self.hooked[0].norms[0]!r} to {self.hooked[-1].norms[-1]!r}" if self.hooked else ""
        return f"{count} branches, alpha {alphas[0]:.4g} .. {alphas[-1]:.4g}{where}"


def attach(
    model: nn.Module,
    alpha_min: float,
    schedule: Schedule = "linear",
    granularity: Granularity = "branch",
    index: Index = "code",
    branches: Branches = "both",
    pairs: Pairs | None = None,
) -> Attached:
    """Give every residual branch of `model` the shortcut of Eq. 3 without changes to its code or its state_dict.

    Branches with alpha = beta = 1 get no hook, so alpha_min = 1 registers none. Copies and pickles of the model stay
    decayed; `copy.deepcopy((model, attached))` gives a copy whose decay can be removed. Graphs compiled before by
    torch.compile are compiled again, since they would ignore the hooks.

    Args:
        model: a model with blocks of timm's `vision_transformer`, of diffusers' DiT, or torch's TransformerEncoderLayer
            with norm_first, all of which are decayed in the order of `model.named_modules()`; or any model, with
            `pairs`. The repr of the returned object gives the number of branches, the first and the last.
        alpha_min: see `uvit_decay.decay.shortcuts`, as for the next four arguments.
        schedule: how alpha falls with depth.
        granularity: one alpha for each residual branch, or one for both branches of a block.
        index: how depth is counted.
        branches: decay both kinds of residual branches, or only one.
        pairs: the branches in execution order, attention before MLP: (norm, branch) names the modules that a branch
            calls first, with x, and last; `Gated` names a block with gates, where only norms and additions use x.

    Raises:
        UserError: a model that is attached already or has no supported block; in its forward, modules that are not
            called as named.
    """
    if any(_is_hooked(module) for module in model.modules()):
        raise UserError("this model is attached already: call remove() of what attach returned, then attach it anew")
    groups = _hooked_branches(model, _known_pairs(model) if pairs is None else pairs)
    count = sum(len(group.norms) for group in groups)
    if count % 2:
        raise UserError(f"branches come in twos, attention and MLP, got {count}: see `pairs` of decay.attach")
    weights = shortcuts(count // 2, alpha_min, schedule, granularity, index, branches)
    attached = Attached(weights, next((p.device for p in model.parameters()), torch.device("cpu")))
    first = 0
    for group in groups:
        last = first + len(group.norms)
        if weights.learnable or {*weights.alphas[first:last], *weights.betas[first:last]} != {1.0}:
            group.register(model, attached.weights, first)
            attached.hooked.append(group)
        first = last
    if attached.hooked:
        _forget_graphs()
    return attached


def _hooked_branches(model: nn.Module, pairs: Pairs) -> list[HookedBranches]:
    """Return the branches of each of `pairs`, without hooks yet; raise a UserError for names that do not exist."""
    groups: list[HookedBranches] = []
    for pair in pairs:
        if isinstance(pair, Gated):
            groups.append(HookedGates([_join(pair.block, norm) for norm in pair.norms], pair.block))
        else:
            norm, branch = pair
            groups.append(HookedPair([norm], branch))
    norms = [norm for group in groups for norm in group.norms]
    names = dict(model.named_modules(remove_duplicate=False))
    for name in [*norms, *(group.end for group in groups)]:
        if name not in names:
            raise UserError(f"the model has no module {name!r}: `pairs` takes the names of model.named_modules()")
    if len({names[norm] for norm in norms}) != len(norms):
        raise UserError("two branches begin with the same module: each needs its own, or one entry in `pairs`")
    return groups


def _timm_block(block: nn.Module) -> Pairs:
    return [("norm1", "drop_path1"), ("norm2", "drop_path2")]


def _torch_layer(layer: nn.Module) -> Pairs:
    if not layer.norm_first:
        raise UserError("this TransformerEncoderLayer norms after the sum, which undoes a decay: build with norm_first")
    return [("norm1", "dropout1"), ("norm2", "dropout2")]


def _diffusers_block(block: nn.Module) -> Pairs:
    if block.norm_type != "ada_norm_zero" or block.attn2 is not None:
        raise UserError("of diffusers' BasicTransformerBlock only DiT's is known (ada_norm_zero): give `pairs`")
    return [Gated("", ("norm1", "norm3"))]


# Classes by name, so that no library is imported. The names of a block's modules would not identify it: timm's
# ResPostBlock has those of Block with another wiring.
_KNOWN: dict[str, Callable[[nn.Module], Pairs]] = {
    "timm.models.vision_transformer.Block": _timm_block,
    "torch.nn.modules.transformer.TransformerEncoderLayer": _torch_layer,
    "diffusers.models.attention.BasicTransformerBlock": _diffusers_block,
}


def _known_pairs(model: nn.Module) -> Pairs:
    """Return the branches of all supported blocks, in the order of the model's modules."""
    pairs: list[tuple[str, str] | Gated] = []
    for name, block in model.named_modules():
        for cls in type(block).__mro__:
            pairs_of = _KNOWN.get(f"{cls.__module__}.{cls.__qualname__}")
            # A subclass with another forward may wire its branches differently, so it is not supported.
            if pairs_of is None or type(block).forward is not cls.forward:
                continue
            for pair in pairs_of(block):
                gated = isinstance(pair, Gated)
                pairs.append(Gated(name, pair.norms) if gated else (_join(name, pair[0]), _join(name, pair[1])))
    if not pairs:
        raise UserError(
            f"decay.attach knows no block of {type(model).__name__}: name its branches in execution order, "
            "pairs=[('blocks.0.norm1', 'blocks.0.drop_path1'), ...]"
        )
    return pairs


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}".strip(".")


def _is_hooked(module: nn.Module) -> bool:
    return any(
        isinstance(getattr(hook, "__self__", None), HookedBranches) for hook in module._forward_pre_hooks.values()
    )


def _forget_graphs() -> None:
    """Discard compiled graphs, which do not check for new hooks (torch._dynamo.config.skip_nnmodule_hook_guards)."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
