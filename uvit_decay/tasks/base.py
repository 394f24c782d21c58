"""What all training tasks share: the optimizer, its schedule, the guards and the figures of a step."""

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

from uvit_decay.data.steps import Batch
from uvit_decay.errors import UserError
from uvit_decay.tasks.resume import Settings, changes, check
from uvit_decay.tasks.sharding import Sharded, compile_net, full, local

NEVER = 2**62  # as a step
MEND = (
    "the last good checkpoint is kept: lower --model.optim.lr, lengthen --model.optim.warmup_steps or set "
    "--trainer.gradient_clip_val"
)


@dataclass(frozen=True)
class Optimization:
    """AdamW and its learning rate.

    Args:
        lr: learning rate after the warm-up.
        betas: AdamW's.
        weight_decay: on all parameters, as U-ViT's code does.
        warmup_steps: the rate rises linearly over so many steps, from lr / warmup_steps.
        schedule: `constant` after the warm-up, or half a `cosine` to 0 at the end of training.

    Raises:
        UserError: a learning rate that is not positive, or another number out of its range.
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
        """What lr is multiplied by at optimizer step `step` (from 0) of `total`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        progress = (step - self.warmup_steps) / max(1, total - self.warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


class Schedule(LambdaLR):
    """A LambdaLR that takes of a checkpoint its step, and nothing of the learning rate."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        step = state_dict["last_epoch"]
        rates = [base * factor(step) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        own = {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates}
        super().load_state_dict({**own, "lr_lambdas": [None] * len(rates)})


def _own_settings(optimizer: Optimizer, stored: dict[str, Any]) -> dict[str, Any]:
    """The state of a checkpoint, for an optimizer that keeps the settings that it was built with."""
    return {**stored, "param_groups": optimizer.state_dict()["param_groups"]}


class Task(LightningModule):
    """Trains `net` with AdamW; subclasses give `loss` and `describe`.

    Logs train/loss, train/lr, train/grad_norm and train/images_per_second; stops at the first loss that is not finite.

    Args:
        net: the network.
        optim: optimizer and learning rate.
        compile: compile the network in place with torch.compile: true, or the name of a backend; checkpoints, probes
            and sampling do not notice. A sharded network is compiled block by block.
        seed: of all random numbers of training.
    """

    def __init__(self, net: nn.Module, optim: Optimization, compile: bool | str = False, seed: int = 0) -> None:
        super().__init__()
        self.net, self.optim, self.seed = net, optim, seed
        self.settings: Settings = {}  # all of the program's, where it tells; compared when a run goes on
        backends = [False, True] if isinstance(compile, bool) else torch.compiler.list_backends(exclude_tags=())
        if compile not in backends:
            raise UserError(f"compile takes true, false or one of {', '.join(backends)}; got {compile!r}")
        self._backend = "inductor" if compile is True else compile
        self._bad_step: Tensor | None = None
        self._losses: list[Tensor] = []  # since the last optimizer step
        self._images, self._clock, self._speed = 0, time.monotonic(), 0.0

    def configure_model(self) -> None:
        """Compile, now that it is known whether the network will be sharded; once, however often it is trained."""
        backend, self._backend = self._backend, False
        if backend:
            compile_net(self.net, backend, isinstance(self.trainer.strategy, Sharded))

    def loss(self, batch: Batch, stage: str) -> Tensor:
        """Scalar float32 loss of a rank's part of a batch; `stage` is "train" or "val"."""
        raise NotImplementedError

    def function(self) -> dict[str, Any]:
        """What the weights depend on, of `describe`: known before there are data."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """All that is needed beside the weights to use the network: plain values, stored in the checkpoint."""
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
        optimizer.register_load_state_dict_pre_hook(_own_settings)
        scheduler = Schedule(optimizer, lambda step: self.optim.factor(step, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _logs_at(self, step: int) -> bool:
        every = self.trainer.log_every_n_steps
        return every > 0 and step % every == 0

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        if self._logs_at(self.trainer.global_step + 1):  # this step is counted only afterwards
            self.raise_if_not_finite()
            self._speed = self._images / (time.monotonic() - self._clock)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        losses, self._losses = self._losses, []
        if self._logs_at(self.trainer.global_step + 1):
            # Of the whole global batch: each piece and each device sees a part of the noise levels.
            self.log("train/loss", torch.stack(losses).mean(), sync_dist=True)
            gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
            self.log("train/grad_norm", full(get_total_norm(gradients)))
            self.log("train/lr", optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Restart the clock after all callbacks have run, so that what they do does not count as training."""
        if self._speed:
            self.log("train/images_per_second", self._speed)
            self._show("train/loss", "train/images_per_second")
            self._speed = 0.0
            self._images, self._clock = 0, time.monotonic()

    def _show(self, *names: str) -> None:
        """Put logged numbers into the progress bar. Lightning's own way would wait for the device at every batch."""
        shown = {name: float(self.trainer.callback_metrics[name]) for name in names}
        self.trainer.progress_bar_metrics.update(shown)

    def on_train_start(self) -> None:
        self._images, self._clock = 0, time.monotonic()

    def _guard(self, loss: Tensor) -> None:
        """Note the first step whose loss is not finite, without waiting for the device."""
        step = torch.where(torch.isfinite(loss), NEVER, self.trainer.global_step)
        self._bad_step = step if self._bad_step is None else torch.minimum(self._bad_step, step)
        if loss.device.type == "cpu" and self.trainer.world_size == 1:
            self.raise_if_not_finite()

    def raise_if_not_finite(self) -> None:
        """Raise a UserError if any loss since the start was NaN or infinite, on any process; all of them must call."""
        own = torch.tensor(NEVER, device=self.device) if self._bad_step is None else self._bad_step
        step = int(self.trainer.strategy.reduce(own, reduce_op="min"))
        if step < NEVER:
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            raise UserError(f"the loss is not finite at step {step} (learning rate {rate:.3g}); {MEND}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.raise_if_not_finite()
        check_finite(self.trainer, self.net.parameters(), "weights")
        pieces = self.trainer.datamodule.pieces
        checkpoint["uvit_decay"] = {**self.describe(), "step": self.trainer.global_step, "pieces": pieces}
        checkpoint["settings"] = self.settings

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check it, say what else differs, and count in the pieces of this run.

        Lightning counts pieces of global batches; here they may be others than where the checkpoint was written.
        """
        check(checkpoint, self, self.trainer, "the checkpoint")
        optim = {"lr": self.optim.lr, "betas": list(self.optim.betas), "weight_decay": self.optim.weight_decay}
        different = changes(checkpoint, self.settings, {**optim, "data": self.trainer.datamodule.name})
        if different and self.trainer.state.fn == "fit":
            rank_zero_info(f"other settings than the checkpoint's: {different}")
        before, now = checkpoint["uvit_decay"].get("pieces", 1), self.trainer.datamodule.pieces
        current = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
        ready = current["ready"]  # whole global batches; the other counts may lag behind by one piece
        for key, count in current.items():
            current[key] = ready // before * now - (ready - count)


def check_finite(trainer: Trainer, tensors: Iterable[Tensor], what: str) -> None:
    """Raise a UserError on all processes if a number in the tensors of any of them is not finite."""
    finite = torch.stack([torch.isfinite(local(tensor.detach())).all() for tensor in tensors]).all()
    if trainer.strategy.reduce_boolean_decision(not finite, all=False):
        raise UserError(f"the {what} are not finite at step {trainer.global_step}; {MEND}")
