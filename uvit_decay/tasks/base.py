"""Base class of the training tasks: optimizer, learning-rate schedule, checks and logged numbers of a step.

A step, in order; Lightning calls these hooks. Step k trains on global batch k.

1. Batch: `StepLoader` yields a piece of this rank's share of global batch k, a function of (seed, k); the data module
   moves it to the device and brings it into the form of the network, float32 in about [-1, 1].
2. Random numbers: times, label dropout and noise are functions of (seed, k, position in the global batch) alone.
3. Loss: `training_step` returns the mean of `loss` over the piece.
4. Guard: `_guard` records on the device whether the loss is finite; only a single process on the CPU raises at once.
5. Accumulation: the backward pass adds the gradients, divided by the number of pieces; 1 to 5 repeat for each piece of
   the global batch. The gradients are averaged over the ranks.
6. Numbers: `on_before_optimizer_step` logs loss, learning rate and the gradient norm before clipping, every
   --trainer.log_every_n_steps.
7. Clipping: by --trainer.gradient_clip_val, if it is set.
8. Optimizer: a step of AdamW; at logged steps the guard is read on all ranks, and a loss that was not finite raises.
9. Schedule: it sets the learning rate of the next step.
10. EMA: the average is updated with the new weights.
11. Checkpoint: `LastCheckpoint` saves if one is due, unless a loss, a weight or an average is not finite.
12. Evaluation: previews, metrics and probes that are due run on the EMA weights if the run keeps them; if one fails,
    the checkpoint of this step is already saved. At logged steps the clock of train/images_per_second restarts then.
    Validation follows if it is due.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from uvit_decay.checkpoint.card import KEY, ModelCard
from uvit_decay.data.batches import Batch
from uvit_decay.runtime.errors import UserError
from uvit_decay.tasks.resume import Settings, changes, check
from uvit_decay.tasks.sharding import Sharded, compile_net, full, local

NEVER = 2**62  # a step that is never reached
HINT = (
    "the last good checkpoint is kept: lower --model.optim.lr, lengthen --model.optim.warmup_steps or set "
    "--trainer.gradient_clip_val"
)


@dataclass(frozen=True)
class Optimization:
    """Settings of AdamW and of its learning-rate schedule.

    Args:
        lr: learning rate after the warm-up.
        betas: decay rates of AdamW's two moments, each in [0, 1).
        weight_decay: applied to all parameters, as in U-ViT's code.
        warmup_steps: length of the linear warm-up, in optimizer steps; it starts at lr / warmup_steps.
        schedule: after the warm-up: `constant`, or half a `cosine` period down to 0 at the end of training.
    """

    lr: float = 2e-4
    betas: tuple[float, float] = (0.99, 0.999)
    weight_decay: float = 0.03
    warmup_steps: int = 2500
    schedule: Literal["constant", "cosine"] = "constant"

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise UserError(f"lr must be positive, got {self.lr}")
        if not (all(0.0 <= beta < 1.0 for beta in self.betas) and self.weight_decay >= 0 and self.warmup_steps >= 0):
            raise UserError(f"betas lie in [0, 1), weight_decay and warmup_steps are not negative; got {self}")

    def factor(self, step: int, total: float) -> float:
        """Return the factor of `lr` at optimizer step `step` (from 0) of `total`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        progress = (step - self.warmup_steps) / max(1, total - self.warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


class Schedule(LambdaLR):
    """A LambdaLR that restores only the step of a checkpoint; the learning rate follows from this run's settings."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        step = state_dict["last_epoch"]
        rates = [base * factor(step) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        state = {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates}
        super().load_state_dict({**state, "lr_lambdas": [None] * len(rates)})


def _with_our_settings(optimizer: Optimizer, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the stored optimizer state with the `param_groups` of `optimizer`, so that its settings are kept."""
    return {**stored, "param_groups": optimizer.state_dict()["param_groups"]}


class Task(LightningModule):
    """Base class of tasks that train `net` with AdamW; subclasses define `loss`, `function`, `card` and `check_data`.

    Logs train/loss, train/lr, train/grad_norm and train/images_per_second; stops if a loss is not finite.

    Args:
        net: the network.
        optim: optimizer and learning rate.
        compile: compile the network in place with torch.compile: true, or the name of a backend; checkpoints, probes
            and sampling work as without it. A sharded network is compiled block by block.
        seed: seed of all random numbers of training.
    """

    def __init__(self, net: nn.Module, optim: Optimization, compile: bool | str = False, seed: int = 0) -> None:
        super().__init__()
        self.net, self.optim, self.seed = net, optim, seed
        self.settings: Settings = {}  # all flags of the run, if the program sets them; compared on resumption
        backends = [False, True] if isinstance(compile, bool) else torch.compiler.list_backends(exclude_tags=())
        if compile not in backends:
            raise UserError(f"compile takes true, false or one of {', '.join(backends)}; got {compile!r}")
        self._backend = "inductor" if compile is True else compile
        self._bad_step: Tensor | None = None
        self._losses: list[Tensor] = []  # since the last optimizer step
        self._images, self._clock, self._speed = 0, time.monotonic(), 0.0

    def configure_model(self) -> None:
        """Compile the network, once for all fits; only here is it known whether it will be sharded."""
        backend, self._backend = self._backend, False
        if backend:
            compile_net(self.net, backend, isinstance(self.trainer.strategy, Sharded))

    def loss(self, batch: Batch, stage: str) -> Tensor:
        """Return the scalar float32 mean loss of a part of a global batch; `stage` is "train" or "val"."""
        raise NotImplementedError

    def function(self) -> dict[str, Any]:
        """Return the fields of `card` that define the function of the weights; they need no data."""
        raise NotImplementedError

    def card(self) -> ModelCard:
        """Return the model card, which is stored in the checkpoint."""
        raise NotImplementedError

    def check_data(self, card: ModelCard) -> None:
        """Raise a UserError if this run's data are not of the kind that the network of a checkpoint was trained on."""
        raise NotImplementedError

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch, "train")
        self._guard(loss.detach())
        self._images += len(batch.images) * self.trainer.world_size
        self._losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch, "val"), prog_bar=True, sync_dist=True, batch_size=len(batch.images))

    def configure_optimizers(self) -> dict[str, Any]:
        total = self.trainer.estimated_stepping_batches
        if self.optim.schedule == "cosine" and math.isinf(total):
            raise UserError("the cosine schedule needs an end: set --trainer.max_steps or --trainer.max_epochs")
        optimizer = AdamW(
            self.net.parameters(),
            self.optim.lr,
            self.optim.betas,
            weight_decay=self.optim.weight_decay,
            # Lightning cannot clip gradients of a fused optimizer under mixed precision.
            fused=not self.trainer.gradient_clip_val,
        )
        optimizer.register_load_state_dict_pre_hook(_with_our_settings)
        scheduler = Schedule(optimizer, lambda step: self.optim.factor(step, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _logs_at(self, step: int) -> bool:
        every = self.trainer.log_every_n_steps
        return every > 0 and step % every == 0

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        if self._logs_at(self.trainer.global_step + 1):  # Lightning counts this step only afterwards
            self.raise_if_not_finite()
            self._speed = self._images / (time.monotonic() - self._clock)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        losses, self._losses = self._losses, []
        if self._logs_at(self.trainer.global_step + 1):
            # Mean over the whole global batch: each piece and each rank has only some of the noise levels.
            self.log("train/loss", torch.stack(losses).mean(), sync_dist=True)
            gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
            self.log("train/grad_norm", full(get_total_norm(gradients)))
            self.log("train/lr", optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log the speed, and restart the clock after all callbacks, so that their time does not count as training."""
        if self._speed:
            self.log("train/images_per_second", self._speed)
            # Lightning's `prog_bar` would wait for the device at every batch.
            for name in ("train/loss", "train/images_per_second"):
                self.trainer.progress_bar_metrics[name] = float(self.trainer.callback_metrics[name])
            self._images, self._clock, self._speed = 0, time.monotonic(), 0.0

    def on_train_start(self) -> None:
        self._images, self._clock, self._speed = 0, time.monotonic(), 0.0

    def _guard(self, loss: Tensor) -> None:
        """Record the first step whose loss is not finite, without waiting for the device."""
        step = torch.where(torch.isfinite(loss), NEVER, self.trainer.global_step)
        self._bad_step = step if self._bad_step is None else torch.minimum(self._bad_step, step)
        if loss.device.type == "cpu" and self.trainer.world_size == 1:
            self.raise_if_not_finite()

    def raise_if_not_finite(self) -> None:
        """Raise a UserError if a loss since the start was NaN or infinite on any rank; all ranks must call this."""
        ours = torch.tensor(NEVER, device=self.device) if self._bad_step is None else self._bad_step
        step = int(self.trainer.strategy.reduce(ours, reduce_op="min"))
        if step < NEVER:
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            raise UserError(f"the loss is not finite at step {step} (learning rate {rate:.3g}); {HINT}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.raise_if_not_finite()
        check_finite(self.trainer, self.net.parameters(), "weights")
        checkpoint[KEY] = self.card().to_dict()
        checkpoint["settings"] = self.settings

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check the checkpoint, in fit report settings that differ, and convert its batch counts to this run's pieces.

        Lightning counts pieces as batches; a global batch may have had another number of them in the checkpoint's run.
        """
        card = check(checkpoint, self, self.trainer, "the checkpoint")
        self.check_data(card)
        optim = {"lr": self.optim.lr, "betas": list(self.optim.betas), "weight_decay": self.optim.weight_decay}
        different = changes(checkpoint, card, self.settings, {**optim, "data": self.trainer.datamodule.name})
        if different and self.trainer.state.fn == "fit":
            rank_zero_info(f"other settings than the checkpoint's: {different}")
        before, now = card.pieces, self.trainer.datamodule.pieces
        current = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
        # Lightning's counts ready, started, processed and completed of the pieces of this epoch. A checkpoint is saved
        # after the last piece of a global batch, so `ready` is a multiple of `before`. Other counts may be one piece
        # lower, since the hook that saves runs before they are raised: convert `ready`, and keep their differences.
        ready = current["ready"]
        for key, count in current.items():
            current[key] = ready // before * now - (ready - count)


def check_finite(trainer: Trainer, tensors: Iterable[Tensor], what: str) -> None:
    """Raise a UserError on all ranks if the tensors of any rank hold NaN or infinity; all ranks must call this."""
    finite = torch.stack([torch.isfinite(local(tensor.detach())).all() for tensor in tensors]).all()
    if trainer.strategy.reduce_boolean_decision(not finite, all=False):
        raise UserError(f"the {what} are not finite at step {trainer.global_step}; {HINT}")
