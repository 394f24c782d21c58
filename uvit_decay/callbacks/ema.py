"""Exponential moving averages of the weights.

Lightning's WeightAveraging is not used: callbacks listed after it get raw weights, an exception in validation leaves
the weights swapped, buffers are averaged, and a run that ends early keeps the initial weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from uvit_decay.runtime.errors import UserError
from uvit_decay.sampling_options import Weights
from uvit_decay.tasks.base import Task, check_finite
from uvit_decay.tasks.sharding import gathered, like, local, local_values, whole


class Average:
    """One moving average: `shadow`, in float32, and the number of `updates` that it has had."""

    def __init__(self, decay: float, ramp: bool) -> None:
        if not 0.0 <= decay < 1.0:
            raise UserError(f"the EMA decay must lie in [0, 1), got {decay}")
        self.decay, self.ramp = decay, ramp
        self.updates = 0
        self.shadow: dict[str, Tensor] = {}

    def start(self, parameters: Mapping[str, Tensor]) -> None:
        """Begin with these weights, unless it has begun; lie where they do, and be sharded as they are."""
        if not self.shadow:
            self.shadow = {name: p.detach().float().clone() for name, p in parameters.items()}
        self.shadow = {name: like(p, self.shadow[name]) for name, p in parameters.items()}

    def update(self, weights: list[Tensor]) -> None:
        """Move towards the float32 weights of this rank, in the order of the shadow."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.ramp else self.decay
        torch._foreach_lerp_(_parts(self.shadow.values()), weights, 1.0 - decay)
        self.updates += 1

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, of full tensors; all ranks must call this."""
        return {"shadow": gathered(self.shadow), "updates": self.updates}


class EMA(Callback):
    """Moving averages of the weights: shadow <- decay shadow + (1 - decay) weights, float32, at every optimizer step.

    The decay ramps up as min(decay, (1 + n) / (10 + n)) after n updates, so that the average of a short run does not
    stay at the initial weights. In a checkpoint `state_dict` holds the raw weights, and this callback's state the
    averages. The network has the first average in validation and within `with averaged(trainer, task):`; previews,
    metrics and probes use it, too. Further ones are kept to choose among them afterwards, `--weights ema:0.999`. Each
    takes 4 bytes a parameter, in memory and in checkpoints. Averages of sharded weights are sharded as they are.

    A resumed run may have other decays than its checkpoint: the averages of decays that both have continue, a further
    one that is new starts from the weights of the checkpoint, with a ramp of its own, and what is no longer named is
    dropped. The first average continues under a new decay, unless the checkpoint has one of that decay.

    Args:
        decay: the final decay, in [0, 1).
        ramp: let the decay rise from 0.1; without it the average is that of the official U-ViT.
        extra_decays: decays of further averages.

    Raises:
        UserError: a decay out of range or given twice; in fit, a network with batch norms whose input depends on
            trained weights.
    """

    def __init__(self, decay: float = 0.9999, ramp: bool = True, extra_decays: Sequence[float] = ()) -> None:
        self.averages = [Average(one, ramp) for one in (decay, *extra_decays)]
        if len({average.decay for average in self.averages}) < len(self.averages):
            raise UserError(f"EMA decays must differ, got {', '.join(map(str, (decay, *extra_decays)))}")
        self._resumed = False
        self._seen_step = 0
        self._raw: list[Tensor] | None = None
        self._trained: list[nn.Parameter] = []  # the parameters of the network

    @property
    def shadow(self) -> dict[str, Tensor]:
        """The first average."""
        return self.averages[0].shadow

    @property
    def updates(self) -> int:
        """The number of updates of the first average."""
        return self.averages[0].updates

    def on_fit_start(self, trainer: Trainer, task: LightningModule) -> None:
        if _trains_below_batch_norm(task.net):
            raise UserError(
                "EMA averages weights, and the running statistics of batch norms would not be those of the average: "
                "leave out the callback EMA for this network"
            )
        parameters = dict(task.net.named_parameters())
        for average in self.averages:
            if self._resumed and not average.shadow:
                rank_zero_info(f"the EMA of decay {average.decay} is new: it starts from the checkpoint's weights")
            average.start(parameters)

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._seen_step = trainer.global_step  # only now restored when a run is resumed
        self._trained = list(task.net.parameters())  # finding them takes as long as averaging those of a tiny network

    def on_train_batch_end(self, trainer: Trainer, task: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._seen_step:  # gradients are being accumulated
            return
        self._seen_step = trainer.global_step
        weights = [local_values(p).float() for p in self._trained]
        for average in self.averages:
            average.update(weights)

    @torch.no_grad()
    def _enter(self, task: LightningModule) -> None:
        self._raw = [p.detach().clone() for p in task.net.parameters()]
        torch._foreach_copy_(_parts(task.net.parameters()), _parts(self.shadow.values()))

    @torch.no_grad()
    def _leave(self, task: LightningModule) -> None:
        torch._foreach_copy_(_parts(task.net.parameters()), _parts(self._raw))
        self._raw = None

    @contextmanager
    def averaged(self, task: LightningModule) -> Iterator[None]:
        """Swap in the EMA weights within the context, and the raw ones after it, even on errors. May be nested."""
        if self._raw is not None or not self.shadow:
            yield
            return
        self._enter(task)
        try:
            yield
        finally:
            self._leave(task)

    def on_validation_start(self, trainer: Trainer, task: LightningModule) -> None:
        if self.shadow:
            self._enter(task)

    def on_validation_end(self, trainer: Trainer, task: LightningModule) -> None:
        if self._raw is not None:
            self._leave(task)

    def on_exception(self, trainer: Trainer, task: LightningModule, exception: BaseException) -> None:
        if self._raw is not None:
            self._leave(task)

    def on_save_checkpoint(self, trainer: Trainer, task: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.shadow:
            values = [value for average in self.averages for value in average.shadow.values()]
            check_finite(trainer, values, "averaged weights")
        if self._raw is not None:  # saved during validation
            names = [f"net.{name}" for name, _ in task.net.named_parameters()]
            checkpoint["state_dict"] |= gathered(dict(zip(names, self._raw, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        first, *others = self.averages
        if not others:
            return first.state()
        extra = {str(average.decay): average.state() for average in others}
        return first.state() | {"decay": first.decay, "extra": extra}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take each average from the one of its decay, and the first one without such from the first in `state`."""
        self._resumed = True
        stored = {float(decay): average for decay, average in state.get("extra", {}).items()}
        if "decay" in state:
            stored[state["decay"]] = state
        first, *others = self.averages
        for average in (first, *(other for other in others if other.decay in stored)):
            found = stored.get(average.decay, state)
            average.updates = found["updates"]
            # Copies: two of ours may continue one of the file's.
            average.shadow = {name: value.clone() if others else value for name, value in found["shadow"].items()}


def _trains_below_batch_norm(net: nn.Module) -> bool:
    """Return whether a batch norm follows on trained parameters, in the order in which the modules are registered."""
    trained = False
    for module in net.modules():
        if trained and isinstance(module, _BatchNorm):
            return True
        trained |= any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return False


def _parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local(tensor) for tensor in tensors]


@contextmanager
def averaged(trainer: Trainer, task: Task) -> Iterator[Weights]:
    """Put `task.net` into eval mode, with EMA weights if the run keeps them, and yield "ema" or "raw".

    Within the context `task.net` is not sharded, so that ranks may call it unequally often. All ranks must enter it.
    """
    ema = next((callback for callback in trainer.callbacks if isinstance(callback, EMA)), None)
    training = task.net.training
    task.sync_batch_norms()
    task.net.eval()
    try:
        with ema.averaged(task) if ema else nullcontext(), whole(task):
            yield "ema" if ema else "raw"
    finally:
        task.net.train(training)
