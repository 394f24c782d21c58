"""The exponential moving average of the weights.

Lightning's WeightAveraging is not used: callbacks listed after it get raw weights, an exception in validation leaves
the weights swapped, buffers are averaged, and a run that ends early keeps the initial weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Annotated, Any
from weakref import ReferenceType, ref

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from uvit_decay.checkpoint.options import Weights
from uvit_decay.tasks.base import Task
from uvit_decay.tasks.finite import check_finite
from uvit_decay.tasks.parallel.sharding import gather, local_shard, shard_like, unsharded_network
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Needs, Within, check_types


@check_types
class EMA(Callback):
    """A moving average of the weights: shadow <- decay shadow + (1 - decay) weights, float32, at every optimizer step.

    A step that is skipped, because its gradient is not finite in float16, does not change the average.

    The decay ramps up as min(decay, (1 + n) / (10 + n)) after n updates, so that the average of a short run does not
    stay at the initial weights. This ramp reaches 0.9999 after 89,990 updates and 0.999 after 8,990. With `ramp_steps`
    it ends earlier, see `ramped_decay`. In a checkpoint, `state_dict` holds the raw weights, and the state of this
    callback holds the average. The network has the average in validation and within `evaluation_weights(trainer,
    task)`, which previews, metrics and probes use. The average takes 4 bytes per parameter, in memory and in
    checkpoints. The average of sharded weights is sharded in the same way.

    Args:
        decay: the final decay, in [0, 1).
        ramp: let the decay rise from a small value; without the ramp, the average is computed as in the official U-ViT.
        ramp_steps: number of updates (optimizer steps) after which the ramp reaches `decay`. Choose at least
            1 / (1 - decay), or much of the average stays at the initial weights. By default the ramp starts at 0.1
            and takes (10 decay - 1) / (1 - decay) updates.

    Raises:
        UserError: in fit, the network has batch norms after trained weights.
    """

    NEEDS = {"ramp_steps": Needs("ramp", True)}

    def __init__(
        self,
        decay: Annotated[float, Within("[0, 1)")] = 0.9999,
        ramp: bool = True,
        ramp_steps: Annotated[int | None, Within("[1, inf)")] = None,
    ) -> None:
        self.decay, self.ramp, self.ramp_steps = decay, ramp, ramp_steps
        self.updates = 0
        self.shadow: dict[str, Tensor] = {}
        self._seen_step = 0
        self._averaged: ReferenceType[nn.Module] | None = None  # the network of `shadow`, None if a checkpoint gave it
        self._raw: list[Tensor] | None = None
        self._validation = ExitStack()  # holds `swap_in` during validation
        self._trained: list[nn.Parameter] = []  # the parameters of the network

    def on_fit_start(self, trainer: Trainer, task: LightningModule) -> None:
        if _trains_below_batch_norm(task.net):
            raise UserError(
                f"EMA cannot average a {type(task.net).__name__}: the running statistics of its batch norms would not "
                "fit the averaged weights; remove EMA from the callbacks"
            )
        if self._averaged is not None and self._averaged() is not task.net:
            self.shadow, self.updates = {}, 0  # the average of a network that was trained before with this callback
        self._averaged = ref(task.net)
        earlier, self.shadow = self.shadow, {}
        for name, parameter in task.net.named_parameters():
            average = earlier[name] if earlier else parameter.detach().float().clone()
            self.shadow[name] = shard_like(parameter, average)

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._seen_step = trainer.global_step  # a resumed run restores it only now
        self._trained = list(task.net.parameters())  # in a tiny network, finding them takes as long as averaging them

    def on_train_batch_end(self, trainer: Trainer, task: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._seen_step:  # gradients are being accumulated
            return
        self._seen_step = trainer.global_step
        if task.skipped.in_row:
            return
        weights = [local_shard(parameter.detach()).float() for parameter in self._trained]
        decay = self.decay
        if self.ramp:
            decay = ramped_decay(decay, self.updates, self.ramp_steps)
        torch._foreach_lerp_(_parts(self.shadow.values()), weights, 1.0 - decay)
        self.updates += 1

    @contextmanager
    def swap_in(self, task: LightningModule) -> Iterator[None]:
        """Put the EMA weights into `task.net` within the context, and restore the raw weights after it.

        The raw weights are restored after an error, too. Contexts may be nested.
        """
        if self._raw is not None or not self.shadow:
            yield
            return
        self._raw = [parameter.detach().clone() for parameter in task.net.parameters()]
        try:
            self._set(task, self.shadow.values())
            yield
        finally:
            self._set(task, self._raw)
            self._raw = None

    @torch.no_grad()
    def _set(self, task: LightningModule, weights: Iterable[Tensor]) -> None:
        torch._foreach_copy_(_parts(task.net.parameters()), _parts(weights))

    def on_validation_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._validation.enter_context(self.swap_in(task))

    def on_validation_end(self, trainer: Trainer, task: LightningModule) -> None:
        self._validation.close()

    def on_exception(self, trainer: Trainer, task: LightningModule, exception: BaseException) -> None:
        self._validation.close()

    def on_save_checkpoint(self, trainer: Trainer, task: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.shadow:
            check_finite(trainer, list(self.shadow.values()), "averaged weights")
        if self._raw is not None:  # saved during validation
            names = [f"net.{name}" for name, _ in task.net.named_parameters()]
            raw = dict(zip(names, self._raw, strict=True))
            checkpoint["state_dict"] |= gather(raw)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, with full tensors; all ranks must call this."""
        return {"shadow": gather(self.shadow), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a stored average; further averages, which older versions kept, are ignored."""
        self.updates = state["updates"]
        self.shadow = dict(state["shadow"])
        self._averaged = None


def _trains_below_batch_norm(net: nn.Module) -> bool:
    """Return whether a batch norm follows trained parameters, in the order in which the modules are registered."""
    trained = False
    for module in net.modules():
        if trained and isinstance(module, _BatchNorm):
            return True
        trained |= any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return False


def _parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local_shard(tensor) for tensor in tensors]


@contextmanager
def evaluation_weights(trainer: Trainer, task: Task) -> Iterator[Weights]:
    """Put `task.net` into eval mode, with EMA weights if the run keeps them, and yield "ema" or "raw".

    All ranks must enter the context. Within it `task.net` is not sharded, so that ranks may call it a different number
    of times.
    """
    weights: Weights = "raw"
    swap: AbstractContextManager[None] = nullcontext()
    for callback in trainer.callbacks:
        if isinstance(callback, EMA):
            weights = "ema"
            swap = callback.swap_in(task)
            break
    training = task.net.training
    task.sync_batch_norms()
    task.net.eval()
    try:
        with swap, unsharded_network(task):
            yield weights
    finally:
        task.net.train(training)


def ramped_decay(decay: float, updates: int, ramp_steps: int | None = None) -> float:
    """Return the decay of the next update on a ramp that ends at `decay`.

    After n updates the ramp is at (1 + n) / (1 + n + c), where c = (1 + N) (1 - decay) / decay, so that it reaches
    `decay` at n = N = `ramp_steps`. By default c is 9. On the ramp, the weights of step n count in proportion to
    n^(c - 1), which is the power function average of EDM2 with gamma = c - 1 (Karras et al. 2024,
    "Analyzing and Improving the Training Dynamics of Diffusion Models", Sec. 3.1).

    Args:
        decay: the final decay, in [0, 1).
        updates: number n of updates that were made before.
        ramp_steps: number of updates after which the ramp ends; None for the default ramp.
    """
    if ramp_steps is None:
        return min(decay, (1 + updates) / (10 + updates))
    grown = decay * (1 + updates)  # numerator and denominator times decay, which may be 0
    return min(decay, grown / (grown + (1 + ramp_steps) * (1 - decay)))
