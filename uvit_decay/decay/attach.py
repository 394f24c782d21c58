"""`attach`: decayed shortcuts for networks of other libraries.

Supported blocks are in `uvit_decay.decay.blocks`, the hooks in `uvit_decay.decay.hooks`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
from torch import Tensor, nn

from uvit_decay.decay.blocks import Gated, Pairs, Single, known_pairs
from uvit_decay.decay.hooks import ExecutionOrder, HookedBranches, HookedPair
from uvit_decay.decay.schedule import Branches, Granularity, Index, Schedule, shortcuts
from uvit_decay.decay.weights import Shortcuts, Weights
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Bounds, check_types


class Attached(nn.Module):
    """Decay attached to a model; `remove()` or the end of a `with` block detaches it.

    `alphas`, one per branch, are a buffer, or a parameter if they are learned; the same holds for betas. They are not
    part of the model, so its state_dict keeps its keys. Train, save and move this module together with the model (under
    DDP, wrap one module that holds both).
    """

    alphas: Tensor
    merges = ()  # of long skips, which are not known

    def __init__(self, weights: Shortcuts, dim: int, device: torch.device) -> None:
        super().__init__()
        self.shortcuts = weights
        self.hooked: list[HookedBranches] = []
        self.order: ExecutionOrder | None = None  # of branches whose names the user gave
        weights.register(self, dim, persistent=False)
        self.connections = nn.ModuleList(weights.connections(self, dim))
        self.to(device)

    def weights(self, k: int) -> Weights:
        """Return the weights of branch k."""
        return self.connections[k].weights()

    def remove(self) -> None:
        """Remove all hooks; the model then computes exactly the same as before `attach`."""
        for hooked in self.hooked:
            hooked.remove()
        if self.order is not None:
            self.order.remove()
            self.order = None
        if self.hooked:
            _forget_graphs()
        self.hooked.clear()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def extra_repr(self) -> str:
        """Return a summary for repr: the number of branches, the alphas, and the first and the last hooked norm."""
        alphas = self.alphas.tolist()
        summary = f"{len(alphas)} branches, alpha {alphas[0]:.4g} .. {alphas[-1]:.4g}"
        if self.hooked:
            first = self.hooked[0].norms[0]
            last = self.hooked[-1].norms[-1]
            summary += f", hooked from {first!r} to {last!r}"
        return summary


@check_types
def attach(
    model: nn.Module,
    alpha_min: float,
    schedule: Schedule = "linear",
    granularity: Granularity = "branch",
    index: Index = "code",
    branches: Branches = "both",
    pairs: Pairs | None = None,
    dim: Annotated[int | None, Bounds(1, 2**16)] = None,
) -> Attached:
    """Decay the shortcuts of a model of another library without changes to its code or its state_dict.

    Branches with alpha = beta = 1 get no hook, so alpha_min = 1 registers none. Copies and pickles of the model stay
    decayed; `copy.deepcopy((model, attached))` gives a copy whose decay can be removed. Graphs that torch.compile
    compiled before are compiled again, because they would ignore the hooks.

    Args:
        model: a model with blocks of timm's `vision_transformer`, of diffusers' DiT, torch's TransformerEncoderLayer
            with norm_first, or torchvision's or timm's `resnet`. All these blocks are decayed in the order of
            `model.named_modules()`. With `pairs`, any model. The repr of the returned object gives the number of
            branches, the first and the last.
        alpha_min: see `uvit_decay.decay.shortcuts`, also for the next four arguments.
        schedule: how alpha falls with depth.
        granularity: one alpha for each residual branch, or one for both branches of a transformer's block.
        index: how depth is counted.
        branches: decay both kinds of a transformer's residual branches, or only one.
        pairs: the branches in execution order, attention before MLP: (norm, branch) names the modules that a branch
            calls first, with x, and last; `Gated` names a block with gates, where only norms and additions use x;
            `Single` names a block with one branch, for networks that consist of such blocks.
        dim: width of the tokens, for a schedule that learns a weight for each channel.

    Raises:
        UserError: the model is attached already or has no supported block, or the schedule does not fit it. The model's
            forward raises it if modules are not called as named, or not in the order of `pairs`.
    """
    _check_not_attached(model)
    named = known_pairs(model) if pairs is None else pairs
    if not named:
        raise UserError("pairs is empty: name the branches of the model, or leave it out for a model of known blocks")
    groups = _build_branches(model, named)
    single = {isinstance(pair, Single) for pair in named}
    if len(single) == 2:
        raise UserError("this model has blocks of transformers and of ResNets; attach to the parts separately")
    per_block = 1 if True in single else 2
    count = sum(len(group.norms) for group in groups)
    if count % per_block:
        raise UserError(f"branches come in twos, attention and MLP, got {count}; see `pairs` of decay.attach")
    weights = shortcuts(count // per_block, alpha_min, schedule, granularity, index, branches, per_block)
    weights.check_numbers("decay.attach")
    if weights.per_channel and dim is None:
        raise UserError(f"the schedule {schedule!r} learns a weight for each channel; give their number, `dim`")
    for group, first, last in _numbered(groups):
        if set(weights.scales[first:last]) != {1.0} and not isinstance(group, HookedPair):
            raise UserError(
                f"the schedule {schedule!r} scales norms, which this model does not separate from its branches; "
                "use another schedule"
            )
    device = torch.device("cpu")  # of a model without parameters
    for parameter in model.parameters():
        device = parameter.device
        break
    attached = Attached(weights, dim or 1, device)
    for group, first, last in _numbered(groups):
        if not weights.plain(first, last):
            group.register(model, attached.weights, first)
            attached.hooked.append(group)
    if attached.hooked:
        _forget_graphs()
        if pairs is not None:
            attached.order = ExecutionOrder(model, groups)
    return attached


def _numbered(groups: Sequence[HookedBranches]) -> Iterator[tuple[HookedBranches, int, int]]:
    """Yield each group with the number of its first branch in the model, and of the first branch after it."""
    first = 0
    for group in groups:
        last = first + len(group.norms)
        yield group, first, last
        first = last


def _check_not_attached(model: nn.Module) -> None:
    """Raise a UserError if `attach` has hooks in the model already."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(getattr(hook, "__self__", None), HookedBranches):
                raise UserError("this model is attached already; call remove() of the earlier result of attach")


def _build_branches(model: nn.Module, pairs: Pairs) -> list[HookedBranches]:
    """Return the branches of each of `pairs`, without hooks yet; raise a UserError for names that do not exist."""
    groups: list[HookedBranches] = []
    for pair in pairs:
        if isinstance(pair, Gated | Single):
            groups.append(pair.build_branches())
        else:
            groups.append(HookedPair(*pair))
    modules = dict(model.named_modules(remove_duplicate=False))
    for group in groups:
        for name in group.modules:
            if name not in modules:
                raise UserError(f"the model has no module {name!r}; `pairs` takes the names of model.named_modules()")
    starts = []
    for group in groups:
        starts += [modules[norm] for norm in group.norms]
    if len(set(starts)) != len(starts):
        raise UserError("two branches begin with the same module; each needs its own, or one entry in `pairs`")
    return groups


def _forget_graphs() -> None:
    """Discard compiled graphs, which do not check for new hooks (torch._dynamo.config.skip_nnmodule_hook_guards)."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
