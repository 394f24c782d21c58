"""Optimizers: what their flags say, which parameters share a learning rate and a decay, and the schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from uvit_decay.nn.base import Residual
from uvit_decay.runtime.errors import UserError, check_choice, check_numbers
from uvit_decay.runtime.optimizers import MUON
from uvit_decay.tasks.optimizer_table import ARGUMENTS, FLAG, OPTIMIZERS, build_class, class_state, named_state
from uvit_decay.tasks.rate_over_gain import RateFactors, RowSteps, rate_factors
from uvit_decay.tasks.sharding import full

DecayOn = Literal["all", "matrices", "layers"]
Annealing = Literal["constant", "cosine"]
IN_PLACE = {"lr": ("blr", 2e-4), "warmup_steps": ("warmup_epochs", 2500)}  # what may replace it; without either
EMBEDDINGS = ("pos_embed", "cls_token")  # which fine-tuning does not decay (MAE's code)


@runtime_checkable
class Layered(Protocol):
    """Network that knows at which depth its parameters act, out of `layers` (the embeddings and L blocks)."""

    layers: tuple[Any, ...]

    def layer_id(self, name: str) -> int:
        """Return 0 for a parameter of the embeddings, i + 1 of block i and L + 1 of anything later."""


@dataclass(frozen=True)
class Optimization:
    """Optimizer and learning-rate schedule.

    Args:
        lr: learning rate after the warm-up; without this and `blr` 2e-4.
        betas: decay rates of AdamW's two moments, each in [0, 1).
        weight_decay: weight decay of the parameters that `decay_on` names.
        warmup_steps: length of the linear warm-up, in optimizer steps; it starts at lr / warmup_steps. Without this and
            `warmup_epochs` 2500.
        schedule: after the warm-up: `constant`, or half a `cosine` period down to `min_lr` at the end of training.
        optimizer: `adamw`, `muon` (for the matrices of blocks, with steps as long as AdamW's, which has all else),
            `lars` (MAE's linear probes), `sgd` with momentum, or the class path of any other optimizer, such as
            `torch.optim.NAdam`. A class gets the groups with their `lr` and `weight_decay`, and `arguments`, but not
            `betas` and `momentum`.
        arguments: further keyword arguments of an optimizer by class path.
        blr: in place of `lr`: the learning rate of a global batch of 256; that of the run is proportional to its batch.
        momentum: of Muon (0.95 is usual), LARS and SGD, in (0, 1).
        decay_on: parameters with weight decay: `all`, as in U-ViT's code; `matrices`, not biases and 1-D tensors (MAE's
            pre-training); `layers`, the matrices apart from class token and positions (MAE's fine-tuning). LARS never
            decays 1-D tensors. Learned alphas are in all three ("standard weight decay", App. A.4 of the paper).
        layer_decay: factor of the learning rate from a layer to the one before it, in (0, 1]; a parameter of layer i,
            see `Layered`, has the rate lr * layer_decay^(L + 1 - i).
        warmup_epochs: in place of `warmup_steps`: the warm-up in epochs, from 0 at the first step (MAE).
        min_lr: learning rate at the end of the cosine.
        rate_over_gain: divide the learning rate of the last layer of each branch, or of its gate in SiT and DiT, by the
            branch's gain, beta / P with P the product of the alphas up to it, so that each branch moves as in the
            plain network. With sgd the rate is divided by the square of the gain. See
            `uvit_decay.tasks.rate_over_gain`, also for why lars, and muon with gates, are refused.
    """

    lr: float | None = None
    betas: tuple[float, float] = (0.99, 0.999)
    weight_decay: float = 0.03
    warmup_steps: int | None = None
    schedule: Annealing = "constant"
    optimizer: str = "adamw"
    blr: float | None = None
    momentum: float = 0.9
    decay_on: DecayOn = "all"
    layer_decay: float = 1.0
    warmup_epochs: float | None = None
    min_lr: float = 0.0
    rate_over_gain: bool = False
    arguments: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, (other, _) in IN_PLACE.items():
            if getattr(self, name) is not None and getattr(self, other) is not None:
                flags = f"--model.optim.{name} or --model.optim.{other}"
                raise UserError(f"{other} is in place of {name}: set {flags} to null")
        rate, warmup = self.flags()
        check_numbers("(0, inf)", **{rate: self.rate(256)})
        check_numbers("[0, inf)", weight_decay=self.weight_decay, min_lr=self.min_lr, **{warmup: self.warmup(1)})
        check_numbers("[0, 1)", **{"the first of betas": self.betas[0], "the second of betas": self.betas[1]})
        check_numbers("(0, 1)", momentum=self.momentum)
        check_numbers("(0, 1]", layer_decay=self.layer_decay)
        for known, name in ((DecayOn, "decay_on"), (Annealing, "schedule")):
            check_choice(known, **{name: getattr(self, name)})
        self._check_optimizer()

    def _check_optimizer(self) -> None:
        rule = OPTIMIZERS.get(self.optimizer)
        if rule is None:  # a class: built once, before any work
            example = {"params": [nn.Parameter(torch.zeros(2, 2))], "lr": self.rate(256)}
            self._optimizer([{**example, "weight_decay": self.weight_decay}], self.rate(256))
        elif self.arguments:
            raise UserError(f"{ARGUMENTS} are for optimizers by class path, not for {self.optimizer}: leave them out")
        if self.rate_over_gain and (rule is None or rule.gain_power is None):
            flags = f"--model.optim.rate_over_gain true with {FLAG} {self.optimizer}"
            others = " or ".join(name for name, rule in OPTIMIZERS.items() if rule.gain_power is not None)
            raise UserError(
                f"{flags}: no rate of a branch is known to follow from its gain; set the optimizer to {others}"
            )

    def rate(self, batch_size: int) -> float:
        """Return the learning rate after the warm-up for this global batch size."""
        lr = IN_PLACE["lr"][1] if self.lr is None else self.lr
        return lr if self.blr is None else self.blr * batch_size / 256

    def warmup(self, epoch: float) -> float:
        """Return the optimizer steps of the warm-up, for an epoch of so many."""
        if self.warmup_epochs is not None:
            return self.warmup_epochs * epoch
        return IN_PLACE["warmup_steps"][1] if self.warmup_steps is None else self.warmup_steps

    def flags(self) -> tuple[str, str]:
        """Return the flags that set the learning rate and the warm-up of this run."""
        rate, warmup = (name if getattr(self, other) is None else other for name, (other, _) in IN_PLACE.items())
        return f"--model.optim.{rate}", f"--model.optim.{warmup}"

    def factor(self, step: int, total: float, epoch: float = 1.0, floor: float = 0.0) -> float:
        """Return the factor of the learning rate at optimizer step `step` (from 0) of `total`.

        Args:
            step: optimizer steps before this one.
            total: optimizer steps of the whole run.
            epoch: optimizer steps of an epoch, used with `warmup_epochs`.
            floor: the factor at the end of the cosine.
        """
        by_epochs = self.warmup_epochs is not None
        warmup = self.warmup(epoch)
        if step < warmup:
            return (step if by_epochs else step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        progress = (step - warmup) / max(1, total - warmup)
        return floor + (1.0 - floor) * (0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))))

    def groups(self, net: nn.Module, lr: float, own: Sequence[tuple[str, nn.Parameter]] = ()) -> list[dict[str, Any]]:
        """Return the trained parameters in groups of one learning rate and weight decay.

        The groups of `net` come first, its last layers before others, then the groups of `own`, which are the named
        parameters that a task holds beside its network. They have the rate `lr`.
        """
        if self.layer_decay < 1.0 and not isinstance(net, Layered):
            raise UserError(f"layer_decay {self.layer_decay}: a {type(net).__name__} has no layers, set it to 1")
        groups: dict[tuple[int, bool, bool, float, bool], list[Tensor]] = {}
        factors = self._factors(net).of_parameters
        hidden = hidden_matrices(net) if self.optimizer == MUON else set()
        for name, parameter in net.named_parameters():
            before_last = len(net.layers) - net.layer_id(name) if self.layer_decay < 1.0 else 0
            factor = factors.get(name, 1.0)  # the rate of the first group is logged: without a factor
            group = before_last, factor != 1.0, not self._decays(name, parameter), factor, name in hidden
            groups.setdefault(group, []).append(parameter)
        return [
            {
                "params": parameters,
                "lr": lr * self.layer_decay**before_last * factor,
                "weight_decay": 0.0 if undecayed else self.weight_decay,
                **({MUON: muon} if hidden else {}),
            }
            for (before_last, _, undecayed, factor, muon), parameters in sorted(groups.items())
        ] + self._own_groups(own, lr)

    def _own_groups(self, own: Sequence[tuple[str, nn.Parameter]], lr: float) -> list[dict[str, Any]]:
        """Return the groups of the parameters beside the network: decayed ones, then undecayed ones."""
        groups = []
        for decays in (True, False):
            parameters = [parameter for name, parameter in own if self._decays(name, parameter) == decays]
            group: dict[str, Any] = {"params": parameters, "lr": lr}
            group["weight_decay"] = self.weight_decay if decays else 0.0
            if self.optimizer == MUON:
                group[MUON] = False  # Muon is for the matrices of blocks
            if parameters:
                groups.append(group)
        return groups

    def _factors(self, net: nn.Module) -> RateFactors:
        """Return the factors of the learning rate, where they are not 1."""
        if not self.rate_over_gain:
            return RateFactors()
        factors = rate_factors(net, OPTIMIZERS[self.optimizer].gain_power)
        if factors.of_rows and self.optimizer == MUON:
            flags = "--model.optim.rate_over_gain true with --model.optim.optimizer muon"
            raise UserError(f"{flags}: muon updates the gates of a {type(net).__name__} with other rows; use adamw")
        return factors

    def _decays(self, name: str, parameter: Tensor) -> bool:
        if self.decay_on == "all" or name == "alphas":
            return True
        if name == "betas":  # as the authors of LayerScale and ReZero
            return False
        embedding = name.rpartition(".")[2] in EMBEDDINGS
        return parameter.ndim > 1 and not (self.decay_on == "layers" and embedding)

    def build(self, net: nn.Module, lr: float, own: Sequence[tuple[str, nn.Parameter]] = ()) -> Optimizer:
        """Return the optimizer of all parameters of `net` and of `own`, see `groups`.

        It takes this run's settings, not a checkpoint's. `lr` is the rate after the warm-up. AdamW is fused: one kernel
        for all parameters.
        """
        groups = self.groups(net, lr, own)
        optimizer = self._optimizer(groups, lr)
        # The settings of this run are kept.
        optimizer.register_load_state_dict_pre_hook(
            lambda ours, stored: {**stored, "param_groups": ours.state_dict()["param_groups"]}
        )
        of_rows = self._factors(net).of_rows
        if of_rows:
            RowSteps(optimizer, [(net.get_parameter(name), factors) for name, factors in of_rows.items()])
        return optimizer

    def _optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        if self.optimizer in OPTIMIZERS:
            return OPTIMIZERS[self.optimizer].build(groups, lr, self.betas, self.momentum)
        return build_class(self.optimizer, self.arguments or {}, groups, lr)

    @property
    def needs_whole_matrices(self) -> bool:
        """Whether the optimizer cannot take sharded matrices."""
        return self.optimizer in OPTIMIZERS and OPTIMIZERS[self.optimizer].whole

    def moments(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return an example of what the optimizer keeps of a parameter after a step.

        It has tensors of the right shapes; an optimizer by class path may keep numbers, too.
        """
        if self.optimizer in OPTIMIZERS:
            return named_state(self.optimizer, parameter, group)
        form = parameter.shape, parameter.stride(), parameter.dtype
        if form not in self._states:
            self._states[form] = class_state(self.optimizer, self.arguments or {}, parameter, group)
        return self._states[form]

    @cached_property
    def _states(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        """States of an optimizer by class path, by shape, strides and dtype of a parameter: each costs a step."""
        return {}

    def tensors_per_parameter(self) -> int:
        """Return the number of tensors as large as a parameter that the optimizer keeps of it, at most."""
        if self.optimizer in OPTIMIZERS:
            return len(OPTIMIZERS[self.optimizer].buffers)
        parameter = torch.zeros(4, 4)
        state = self.moments(parameter, {"lr": 1e-3, "weight_decay": self.weight_decay})
        return sum(isinstance(value, Tensor) and value.shape == parameter.shape for value in state.values())


def hidden_matrices(net: nn.Module) -> set[str]:
    """Return the names of the weights of linear layers in the residual blocks of `net`; a UserError without any."""
    blocks = [(name, block) for name, block in net.named_modules() if isinstance(block, Residual)]
    linears = ((f"{name}.{inner}", m) for name, block in blocks for inner, m in block.named_modules())
    found = {f"{name}.weight" for name, module in linears if isinstance(module, nn.Linear)}
    if not found:
        raise UserError(f"muon is for the matrices of blocks, of which a {type(net).__name__} has none: use adamw")
    return found


def run_length(trainer: Trainer) -> tuple[int, float]:
    """Return the optimizer steps of an epoch and of the whole run, which may be infinite.

    Lightning's `estimated_stepping_batches` sets up the loader, and a resumed run would then not move it to the
    place of its checkpoint. No loader is made here, which could move images to a GPU once more.
    """
    batches, limit = trainer.datamodule.count_train_batches(), trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    epoch = math.ceil(batches / trainer.accumulate_grad_batches)
    total = math.inf if trainer.max_epochs in (None, -1) else epoch * max(trainer.max_epochs, 1)
    return epoch, total if trainer.max_steps == -1 else min(total, trainer.max_steps)


class Schedule(LambdaLR):
    """A LambdaLR that restores only the step of a checkpoint; the learning rate follows from this run's settings."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        step = state_dict["last_epoch"]
        rates = [base * factor(step) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        state = {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates}
        super().load_state_dict({**state, "lr_lambdas": [None] * len(rates)})


def clip(optimizer: Optimizer, bound: float, algorithm: str, needs_norm: bool) -> Tensor | None:
    """Clip the gradient in place; its norm is computed once.

    Args:
        optimizer: holds the parameters, which may be sharded.
        bound: most of what `algorithm` names; 0 clips nothing.
        algorithm: `norm`, of the whole gradient, or `value`, the magnitude of each number.
        needs_norm: compute the norm even if clipping does not need it.

    Returns:
        the norm before clipping, the same on all ranks, a scalar on the device; None if it was not computed.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    # torch's functions take tensors that are all sharded, or all whole.
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    parts = [part for part in ([p for p in parameters if not isinstance(p, DTensor)], sharded) if part]
    by_norm, norm = bound > 0 and algorithm == "norm", None
    if by_norm or needs_norm:
        norms = [full(get_total_norm([p.grad for p in part])) for part in parts]
        norm = norms[0] if len(norms) == 1 else get_total_norm(norms)
    for part in parts if bound > 0 else ():
        if by_norm:
            clip_grads_with_norm_(part, bound, norm)
        else:
            clip_grad_value_(part, bound)
    return norm
