"""Options of the optimizer and the schedule, and the groups of parameters with one learning rate and weight decay."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from uvit_decay.nn.base import Residual
from uvit_decay.runs.settings import ALTERNATIVES
from uvit_decay.runtime.optimizers import MUON
from uvit_decay.tasks.optim.rate_over_gain import RateFactors, RowSteps, rate_factors
from uvit_decay.tasks.optim.table import OPTIMIZERS, build_class
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Bounds, Needs, Positive, Within, check_types

Annealing = Literal["constant", "cosine", "wsd"]
DecayOn = Literal["all", "matrices", "layers"]
EMBEDDINGS = ("pos_embed", "cls_token")  # without weight decay in fine-tuning (MAE's code)


@runtime_checkable
class Layered(Protocol):
    """Network that tells the depth of each parameter; `layers` are the embeddings and L blocks."""

    layers: tuple[Any, ...]

    def layer_id(self, name: str) -> int:
        """Return 0 for a parameter of the embeddings, i + 1 for block i, and L + 1 for everything later."""


@dataclass(frozen=True, order=True)
class GroupKey:
    """Properties that the parameters of a group share; groups are sorted by them, in this order."""

    before_last: int  # layers from this one to the last
    has_factor: bool  # groups without a factor come first: train/lr is the rate of the first group
    undecayed: bool
    factor: float  # of the learning rate
    hidden: bool  # a matrix or convolution of a block, which Muon updates


@check_types
@dataclass(frozen=True)
class Optimization:
    """Optimizer and learning-rate schedule.

    Args:
        lr: learning rate after the warm-up; 2e-4 if neither this nor `blr` is given.
        betas: decay rates of AdamW's two moments, each in [0, 1).
        weight_decay: weight decay of the parameters that `decay_on` names.
        warmup_steps: length of the linear warm-up, in optimizer steps; it starts at lr / warmup_steps. 2500 if neither
            this nor `warmup_epochs` is given.
        schedule: after the warm-up: `constant`; half a `cosine` period down to `min_lr` at the end of training; or
            `wsd` (warm-up, stable, decay), constant until the last `cooldown` steps, then linear down to `min_lr`.
        optimizer: `adamw`, `muon` (for the matrices and convolutions of blocks, with steps as long as AdamW's; AdamW
            updates all other parameters), `lars` (MAE's linear probes), `sgd` with momentum, or the class path of any
            other optimizer, such as `torch.optim.NAdam`. A class gets the groups with their `lr` and `weight_decay`,
            and `arguments`, but not `betas` and `momentum`.
        arguments: further keyword arguments of an optimizer by class path.
        blr: instead of `lr`: the learning rate for a global batch of 256. The rate of the run is proportional to its
            global batch.
        momentum: of Muon (0.95 is usual), LARS and SGD, in (0, 1).
        decay_on: parameters with weight decay: `all`, as in U-ViT's code; `matrices`, not biases and 1-D tensors (MAE's
            pre-training); `layers`, the matrices apart from class token and positions (MAE's fine-tuning). LARS never
            decays 1-D tensors. Learned alphas are in all three ("standard weight decay", App. A.4 of the paper).
        layer_decay: factor of the learning rate from a layer to the layer before it, in (0, 1]. A parameter of layer i,
            see `Layered`, has the rate lr * layer_decay^(L + 1 - i).
        warmup_epochs: instead of `warmup_steps`: the warm-up in epochs, from 0 at the first step (MAE).
        min_lr: learning rate at the end of the cosine or of the cool-down.
        cooldown: length of the cool-down of `wsd`, in optimizer steps.
        rate_over_gain: divide the learning rate of the last layer of each branch, or of its gate in SiT and DiT, by the
            branch's gain, beta / P with P the product of the alphas up to it, so that each branch moves as in the
            plain network. With sgd the rate is divided by the square. It does not work with lars, with muon for
            networks with gates, nor for ResNets: see `uvit_decay.tasks.optim.rate_over_gain`.
    """

    NEEDS = {
        "cooldown": Needs("schedule", "wsd"),
        "min_lr": Needs("schedule", "cosine", "wsd"),
        "arguments": Needs("optimizer", unless=tuple(OPTIMIZERS)),
    }
    lr: Annotated[float | None, Within("(0, inf)")] = None
    betas: Annotated[tuple[float, float], Within("[0, 1)")] = (0.99, 0.999)
    weight_decay: Annotated[float, Within("[0, inf)")] = 0.03
    warmup_steps: Annotated[int | None, Bounds(0)] = None
    schedule: Annealing = "constant"
    optimizer: str = "adamw"
    blr: Annotated[float | None, Within("(0, inf)")] = None
    momentum: Annotated[float, Within("(0, 1)")] = 0.9
    decay_on: DecayOn = "all"
    layer_decay: Annotated[float, Within("(0, 1]")] = 1.0
    warmup_epochs: Annotated[float | None, Within("[0, inf)")] = None
    min_lr: Annotated[float, Within("[0, inf)")] = 0.0
    rate_over_gain: bool = False
    arguments: dict[str, Any] | None = None
    cooldown: Positive | None = None

    def __post_init__(self) -> None:
        for name, (other, _) in ALTERNATIVES.items():
            if getattr(self, name) is not None and getattr(self, other) is not None:
                raise UserError(f"`{other}` replaces `{name}`, and both are given: set one of them to null")
        if self.schedule == "wsd" and self.cooldown is None:
            raise UserError("the wsd schedule needs the length of its cool-down in steps: set `cooldown`")
        rule = OPTIMIZERS.get(self.optimizer)
        if rule is None:  # a class: it is built once, so that it fails before any work
            lr = self.rate(256)
            example = nn.Parameter(torch.zeros(2, 2))
            group = {"params": [example], "lr": lr, "weight_decay": self.weight_decay}
            self._build_optimizer([group], lr)
        if self.rate_over_gain and (rule is None or rule.gain_power is None):
            others = " or ".join(name for name, rule in OPTIMIZERS.items() if rule.gain_power is not None)
            raise UserError(
                f"`rate_over_gain`: no rate of {self.optimizer} follows from the gain of a branch; set `optimizer` to "
                f"{others}"
            )

    def check_length(self, total: float, epoch: float) -> None:
        """Raise a UserError unless the warm-up and the schedule fit into a run.

        Args:
            total: optimizer steps of the run; infinite if its end is not known.
            epoch: optimizer steps of an epoch.
        """
        if self.warmup_epochs is not None and math.isinf(epoch):
            raise UserError(
                f"`warmup_epochs` {self.warmup_epochs:g}: the loader does not tell its length: set it to null, and "
                "`warmup_steps`"
            )
        if self.schedule == "constant":
            return
        if math.isinf(total):
            names = "`max_steps`"
            if not math.isinf(epoch):
                names += " or `max_epochs`"
            raise UserError(f"the {self.schedule} schedule needs an end: set {names}")
        warmup = self.warmup(epoch)
        constant = total - warmup
        if self.cooldown is not None and self.cooldown > constant:
            lower = f"`{self.used_name('warmup_steps')}`" if constant < 1 else "it"
            raise UserError(
                f"`cooldown` {self.cooldown}: a run of {total:g} steps has {max(constant, 0):g} after the "
                f"warm-up of {warmup:g}; lower {lower}, or train longer"
            )

    def rate(self, batch_size: int) -> float:
        """Return the learning rate after the warm-up for this global batch size."""
        if self.blr is not None:
            return self.blr * batch_size / 256
        if self.lr is not None:
            return self.lr
        _, default = ALTERNATIVES["lr"]
        return default

    def warmup(self, epoch: float) -> float:
        """Return the number of warm-up steps, given the number of optimizer steps per epoch."""
        if self.warmup_epochs is not None:
            return self.warmup_epochs * epoch
        if self.warmup_steps is not None:
            return self.warmup_steps
        _, default = ALTERNATIVES["warmup_steps"]
        return default

    def remarks(self, batch_size: int, total: float, epoch: float) -> Iterator[str]:
        """Yield lines on the learning rate that follows from `blr`, and on a run that ends within its warm-up.

        Args:
            batch_size: global batch size.
            total: optimizer steps of the run; infinite if its end is not known.
            epoch: optimizer steps of an epoch.
        """
        if self.blr is not None:
            yield f"learning rate {self.rate(batch_size):g} = blr {self.blr:g} x global batch {batch_size} / 256"
        shorter = self.find_shorter_warmup(total, epoch)
        if shorter is not None:
            length = f"the run ends at step {total:g}, within its warm-up of {self.warmup(epoch):g} steps"
            yield f"warning: {length}: set {shorter}"

    def find_shorter_warmup(self, total: float, epoch: float) -> str | None:
        """Return the setting of a warm-up over a tenth of the run if the run ends within its warm-up; otherwise None.

        Args:
            total: optimizer steps of the run; infinite if its end is not known.
            epoch: optimizer steps of an epoch.
        """
        if self.warmup(epoch) < total:
            return None
        if self.warmup_epochs is not None:
            return f"`warmup_epochs` {total / epoch / 10:.2g}"
        return f"`warmup_steps` {max(1, int(total // 10))}"

    def used_name(self, name: str) -> str:
        """Return the argument that sets the learning rate, given "lr", or the warm-up, given "warmup_steps"."""
        other, _ = ALTERNATIVES[name]
        return name if getattr(self, other) is None else other

    def factor(self, step: int, total: float, epoch: float = 1.0, floor: float = 0.0) -> float:
        """Return the factor of the learning rate at optimizer step `step` (from 0) of `total`.

        Args:
            step: optimizer steps before this one.
            total: optimizer steps of the whole run.
            epoch: optimizer steps of an epoch, used with `warmup_epochs`.
            floor: the factor at the end of the cosine or of the cool-down.
        """
        warmup = self.warmup(epoch)
        if step < warmup:
            begun = step if self.warmup_epochs is not None else step + 1
            return begun / warmup
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "wsd":
            left = max(0.0, total - step)
            return floor + (1.0 - floor) * min(1.0, left / self.cooldown)
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return floor + (1.0 - floor) * cosine

    def groups(self, net: nn.Module, lr: float, own: Sequence[tuple[str, nn.Parameter]] = ()) -> list[dict[str, Any]]:
        """Return the trained parameters in groups of one learning rate and weight decay.

        Args:
            net: the network. Its groups come first, and among them the groups of its last layers.
            lr: learning rate after the warm-up.
            own: named parameters that a task holds beside its network. They have the rate `lr`.
        """
        groups = []
        for key, parameters in self._sort_parameters(net).items():
            rate = lr * self.layer_decay**key.before_last * key.factor
            group: dict[str, Any] = {"params": parameters, "lr": rate}
            group["weight_decay"] = 0.0 if key.undecayed else self.weight_decay
            if self.optimizer == MUON:
                group[MUON] = key.hidden
            groups.append(group)
        return groups + self._own_groups(own, lr)

    def _sort_parameters(self, net: nn.Module) -> dict[GroupKey, list[Tensor]]:
        """Return the parameters of a network by group, in the order of the groups."""
        if self.layer_decay < 1.0 and not isinstance(net, Layered):
            raise UserError(f"layer_decay {self.layer_decay}: a {type(net).__name__} has no layers, set it to 1")
        factors = self._factors(net).of_parameters
        hidden: set[str] = set()
        if self.optimizer == MUON:
            hidden = find_hidden_matrices(net)
        groups: dict[GroupKey, list[Tensor]] = {}
        for name, parameter in net.named_parameters():
            before_last = 0
            if self.layer_decay < 1.0:
                before_last = len(net.layers) - net.layer_id(name)
            factor = factors.get(name, 1.0)
            undecayed = not self._decays(name, parameter)
            key = GroupKey(before_last, factor != 1.0, undecayed, factor, name in hidden)
            groups.setdefault(key, []).append(parameter)
        return dict(sorted(groups.items()))

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
        """Return the factors of the learning rate that are not 1."""
        if not self.rate_over_gain:
            return RateFactors()
        factors = rate_factors(net, OPTIMIZERS[self.optimizer].gain_power)
        if self.optimizer == MUON and factors.of_rows.keys() & find_hidden_matrices(net):
            raise UserError(
                f"`rate_over_gain`: muon updates the gates of a {type(net).__name__} together with other rows; set "
                "`optimizer` to adamw"
            )
        return factors

    def _decays(self, name: str, parameter: Tensor) -> bool:
        """Return whether a parameter has weight decay."""
        if name.startswith("connections."):  # the papers of such connections have none
            return False
        if self.decay_on == "all" or name == "alphas":
            return True
        if name == "betas":  # as the authors of LayerScale and ReZero
            return False
        if parameter.ndim <= 1:
            return False
        is_embedding = name.rpartition(".")[2] in EMBEDDINGS
        return not (self.decay_on == "layers" and is_embedding)

    def build(
        self, net: nn.Module, lr: float, own: Sequence[tuple[str, nn.Parameter]] = (), fused: bool = True
    ) -> Optimizer:
        """Return the optimizer of all parameters of `net` and of `own`, see `groups`.

        A checkpoint restores its moments, not its settings: they are the settings of this run. `lr` is the rate after
        the warm-up. With `fused`, AdamW is one kernel for all parameters; float16 needs an AdamW that is not.
        """
        optimizer = self._build_optimizer(self.groups(net, lr, own), lr, fused)
        optimizer.register_load_state_dict_pre_hook(_keep_groups)
        of_rows = self._factors(net).of_rows
        if of_rows:
            RowSteps(optimizer, [(net.get_parameter(name), factors) for name, factors in of_rows.items()])
        return optimizer

    def _build_optimizer(self, groups: list[dict[str, Any]], lr: float, fused: bool = True) -> Optimizer:
        if self.optimizer in OPTIMIZERS:
            return OPTIMIZERS[self.optimizer].build(groups, lr, self.betas, self.momentum, fused)
        return build_class(self.optimizer, self.arguments or {}, groups, lr)


class Schedule(LambdaLR):
    """A LambdaLR that restores only the step of a checkpoint; the learning rate follows from this run's settings."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        step = state_dict["last_epoch"]
        rates = []
        for group, base, factor in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True):
            rate = base * factor(step)
            group["lr"] = rate
            rates.append(rate)
        state = {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates, "lr_lambdas": [None] * len(rates)}
        super().load_state_dict(state)


def _keep_groups(optimizer: Optimizer, stored: dict[str, Any]) -> dict[str, Any]:
    """Return a stored state with the groups of this run's optimizer, which hold its settings."""
    return {**stored, "param_groups": optimizer.state_dict()["param_groups"]}


def find_hidden_matrices(net: nn.Module) -> set[str]:
    """Return the names of the weights of linear layers and convolutions in residual blocks."""
    found = set()
    for name, block in net.named_modules():
        if not isinstance(block, Residual):
            continue
        for inner, module in block.named_modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                found.add(f"{name}.{inner}.weight")
    if not found:
        raise UserError(f"muon is for the matrices of blocks, and a {type(net).__name__} has none: use adamw")
    return found
