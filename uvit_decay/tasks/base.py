"""Base class of the training tasks: optimizer, learning-rate schedule, checks and logged numbers of a step.

A step, in order; Lightning calls these hooks. Step k trains on global batch k.

1. Batch: `StepLoader` yields a micro-batch of this rank's share of global batch k, a function of (seed, k); the
   data module moves it to the device and brings it into the form of the network, float32 in about [-1, 1].
2. Random numbers: times, label dropout and noise are functions of (seed, k, position in the global batch) alone.
3. Loss: `training_step` returns the mean of `loss` over the micro-batch.
4. Guard: `_guard` records on the device whether the loss is finite; only a single process on the CPU raises at once.
5. Accumulation: the backward pass adds the gradients, divided by the number of micro-batches; 1 to 5 repeat for each
   micro-batch. The gradients are averaged over the ranks.
6. Numbers: `on_before_optimizer_step` logs loss and learning rate every --trainer.log_every_n_steps.
7. Clipping: `configure_gradient_clipping` computes the gradient norm once, logs it, and clips by
   --trainer.gradient_clip_val, if it is set.
8. Optimizer: its step; at logged steps the guard is read on all ranks, and a loss that was not finite raises.
9. Schedule: it sets the learning rate of the next step.
10. EMA: the average is updated with the new weights.
11. Checkpoint: `LastCheckpoint` saves if one is due, unless a loss, a weight or an average is not finite.
12. Evaluation: previews, metrics and probes that are due run on the EMA weights if the run keeps them; if one fails,
    the checkpoint of this step is already saved. At logged steps the clock of train/images_per_second restarts then.
    Validation follows if it is due.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from uvit_decay.checkpoint.io import KEY, ModelCard, StoredModel, load
from uvit_decay.class_names import class_hash
from uvit_decay.data.batches import Batch
from uvit_decay.data.datamodule import ImageData
from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.nn.base import check_attributes
from uvit_decay.runtime.errors import RunEnded, UserError
from uvit_decay.runtime.instantiate import Spec
from uvit_decay.runtime.precision import check_training_precision
from uvit_decay.sampling_options import Weights
from uvit_decay.tasks.auxiliary import PREFIX, AuxiliaryLoss, AuxiliaryLosses, Observed
from uvit_decay.tasks.compilation import compile_net
from uvit_decay.tasks.init_from import adapt, read_initial
from uvit_decay.tasks.loader_data import LoaderData
from uvit_decay.tasks.optimization import Optimization, Schedule, clip, run_length
from uvit_decay.tasks.own import name_own_state, own_parameters
from uvit_decay.tasks.resumption.check import check, check_data, other_settings, restore_counters
from uvit_decay.tasks.resumption.settings import Settings
from uvit_decay.tasks.sharding import Sharded, average_gradients, local, original_class
from uvit_decay.tasks.utilisation import Utilisation

AUTO = "auto"
NEVER = 2**62  # a step that is never reached


class Task(LightningModule):
    """Base class of tasks that train `net`.

    Logs train/loss, train/lr, train/grad_norm, train/images_per_second, train/mfu and train/memory_gib, and train/aux/*
    of auxiliary losses; stops if a loss is not finite.

    A subclass defines `loss`. It may extend `setup`, which checks the data before training, and `function_spec`, the
    description of what is trained that its checkpoints record and a resumed run must equal.

    A task trains what it holds. Parameters beside `net` that need gradients, as those of a projector, have the learning
    rate of the run and the weight decay that `decay_on` says for their shape; they are stored, restored and clipped as
    the network's, and each must get a gradient in every step if there are several processes. Modules with trained
    parameters are built in the constructor. A frozen module (requires_grad False) is neither trained nor stored.
    Averages (EMA), samples, exports and model cards are of `net` alone.

    Args:
        net: the network, with the attributes of `uvit_decay.nn.base.ImageNetwork`.
        optim: optimizer and learning rate.
        compile: compile the network in place with torch.compile: true, or the name of a backend; checkpoints, probes
            and sampling work as without it. `auto` is true on CUDA GPUs, and false on CPUs, where it takes a minute to
            gain up to a fifth. On GPUs and where it is sharded the network is compiled block by block.
        seed: seed of all random numbers of training.
        auxiliary: further losses, of the token states of the network; see `AuxiliaryLoss`.
    """

    path: NoisePath | None = None  # of a denoiser, and how to sample from it
    sampling: Sampling | None = None
    init_from: str | None = None  # a file whose weights `load_initial` reads

    def __init__(
        self,
        net: nn.Module,
        optim: Optimization,
        compile: bool | str = AUTO,
        seed: int = 0,
        auxiliary: Sequence[AuxiliaryLoss] | None = None,
    ) -> None:
        super().__init__()
        check_attributes(net, f"net is a {type(net).__name__}")
        self.net, self.optim, self.seed = net, optim, seed
        self.auxiliary = AuxiliaryLosses(auxiliary or [], net)
        name_own_state(self)
        self.settings: Settings = {}  # all flags of the run, if the program sets them; compared on resumption
        self.allowed: Sequence[str] = ()  # settings that may differ from those of the checkpoint, --resume.allow
        self.start: tuple[str, int] | None = None  # the checkpoint and its step, if the program sets them
        backends = (AUTO, *torch.compiler.list_backends(exclude_tags=()))
        if not isinstance(compile, bool) and compile not in backends:
            raise UserError(f"compile takes true, false or one of {', '.join(backends)}; got {compile!r}")
        self._backend = "inductor" if compile is True else compile
        self._bad_step: Tensor | None = None
        self._losses: list[dict[str, Tensor]] = []  # by name in logs, since the last optimizer step
        self._observed: Observed | None = None  # the network, in a training step with auxiliary losses
        self._loader_data: LoaderData | None = None
        self._observing = False  # within such a step
        self._initial: StoredModel | None = None  # read, and not yet loaded
        self._before = 0, 0  # step of the checkpoint, and images until then
        self._utilisation = Utilisation()

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path, weights: Weights | None = None, trusted: Sequence[str] = (), **given: Any
    ) -> Self:
        """Return a task with the network of a checkpoint, in eval mode.

        `weights` and `trusted` are those of `uvit_decay.checkpoint.load`; `given` are further arguments, as `optim`. To
        resume the run of a checkpoint, give it to `Trainer.fit` as `ckpt_path`.
        """
        return cls(load(Path(checkpoint_path), weights, trusted).net, **given).eval()

    def configure_model(self) -> None:
        """Compile the network, once for all fits; only here are its device and whether it will be sharded known."""
        backend, self._backend = self._backend, False
        on_gpu = self.trainer.strategy.root_device.type == "cuda"
        if backend == AUTO:
            backend = "inductor" if on_gpu and find_spec("triton") is not None else False
        if backend:
            compile_net(self.net, backend, by_block=on_gpu or isinstance(self.trainer.strategy, Sharded))

    def load_initial(self) -> None:
        """Read the file from which a new run starts, once; a run that resumes sets `init_from` to None before.

        Its weights are loaded in `setup`, where the classes of the data are known.
        """
        if self.init_from is not None:
            file, self.init_from = Path(self.init_from), None
            self._initial = read_initial(file, self.net, self.function_spec())

    @property
    def images_seen(self) -> int:
        """Training images so far, over all devices and all parts of a resumed run."""
        step, images = self._before
        return images + (self.trainer.global_step - step) * self.data.batch_size

    @property
    def data(self) -> ImageData | LoaderData:
        """The data module of this run, or what stands for it where a script passes its own loaders."""
        given = self.trainer.datamodule
        if isinstance(given, ImageData):
            return given
        if self._loader_data is None or self._loader_data.trainer is not self.trainer:
            self._loader_data = LoaderData(self.trainer, self.net)
        return self._loader_data

    def sync_batch_norms(self) -> None:
        """Make the network the same on all ranks before it is judged or saved; all ranks must call this."""

    def loss(self, batch: Batch, stage: str) -> Tensor:
        """Return the scalar float32 mean loss of a part of a global batch; `stage` is "train" or "val".

        It calls `self.net`, or for auxiliary losses what `observed` returns, once.
        """
        raise NotImplementedError

    def observed(self, batch: Batch, times: Tensor | None = None) -> nn.Module | Observed:
        """Return the network for `loss`; within a training step the auxiliary losses see its states when it is called.

        Args:
            batch: the part of a global batch that the loss is of.
            times: noise levels (b,) of the images that the network sees; None for networks without times.
        """
        if not self._observing:
            return self.net
        self._observed = Observed(self.net, self.auxiliary, batch, times)
        return self._observed

    def setup(self, stage: str) -> None:
        """Raise a UserError if the data do not fit the network; load the weights from which a new run starts."""
        data = self.data
        check_training_precision(self.trainer.precision)
        if isinstance(data, ImageData):
            self._check_data(data)
        if self.optim.needs_whole_matrices and isinstance(self.trainer.strategy, Sharded):
            raise UserError(f"{self.optim.optimizer} needs whole matrices: set --trainer.strategy ddp, not fsdp")
        if stage == "fit" and len(self.auxiliary):
            self.auxiliary.prepare(data, data.batch_size // (self.trainer.world_size * data.micro_batches))
        if stage == "fit" and isinstance(data, ImageData) and data.test is None:
            self.trainer.limit_val_batches = 0  # Lightning would warn of an empty list
        if stage == "fit" and self.trainer.ckpt_path is None:
            self.load_initial()
            if self._initial is not None:
                rank_zero_info("\n".join(adapt(self.net, self._initial, self.function_spec(), data)))
                self._initial = None

    def _check_data(self, data: ImageData) -> None:
        """Raise a UserError if image size, channels or number of classes of the data are not the network's."""
        required = {"image_size": data.image_size, "channels": data.channels}
        if self.net.num_classes:
            required["num_classes"] = len(data.class_names)
        if other := {key: value for key, value in required.items() if getattr(self.net, key) != value}:
            of_data = ", ".join(f"{key} {value}" for key, value in other.items())
            of_net = ", ".join(str(getattr(self.net, key)) for key in other)
            flags = " ".join(_flags_for(data, key, value, getattr(self.net, key)) for key, value in other.items())
            raise UserError(f"the data have {of_data}, the network {of_net}: set {flags}")

    def function_spec(self) -> dict[str, Any]:
        """Return the fields of `card` that define the function of the weights; they need no data."""
        return {"net": Spec.of(original_class(self.net), self.net.config)}

    def card(self) -> ModelCard:
        """Return the model card, which is stored in the checkpoint: the network, and the data of this run."""
        data = self.data
        known = isinstance(data, ImageData)
        return ModelCard(
            **self.function_spec(),
            sampling=self.sampling,
            class_names=tuple(data.class_names) if self.net.num_classes else (),
            class_hash=class_hash(data.class_names) if known else None,
            data=data.name,
            latents=data.latents,
            step=self.trainer.global_step,
            data_hash=data.fingerprint,
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        batch = self._batch(batch, batch_idx, trains=True)
        loss, auxiliary = self._losses_of(batch)
        total = loss + self.auxiliary.weighted_sum(auxiliary) if auxiliary else loss
        self._guard(~torch.isfinite(total.detach()))
        self._utilisation.images += len(batch.images) * self.trainer.world_size
        shown = auxiliary | self.auxiliary.figures() if auxiliary else {}
        logged = {"train/loss": loss} | {f"{PREFIX}{name}": value for name, value in shown.items()}
        self._losses.append({name: value.detach().float() for name, value in logged.items()})
        return total

    def _batch(self, given: Any, index: int, trains: bool) -> Batch:
        """Return a batch of a data module as it is, and a batch of a script's own loader as a `Batch`."""
        return given if isinstance(given, Batch) else self.data.batch(given, index, trains)

    def _losses_of(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the task, and the auxiliary losses by name without their weights."""
        self._observing = len(self.auxiliary) > 0
        try:
            loss = self.loss(batch, "train")
            if not self._observing:
                return loss, {}
            if self._observed is None or not self._observed.values:
                kind = type(self).__name__
                raise UserError(f"--model.auxiliary: {kind}.loss does not call the network that `observed` returns")
            return loss, self._observed.values
        finally:
            self._observing, self._observed = False, None

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        batch = self._batch(batch, batch_idx, trains=False)
        self.log("val/loss", self.loss(batch, "val"), prog_bar=True, sync_dist=True, batch_size=len(batch.images))

    def configure_optimizers(self) -> dict[str, Any]:
        data = self.data
        epoch, total = run_length(self.trainer) if isinstance(data, ImageData) else data.run_length()
        if self.optim.schedule == "cosine" and math.isinf(total):
            raise UserError("the cosine schedule needs an end: set --trainer.max_steps or --trainer.max_epochs")
        batch = data.batch_size
        lr = self.optim.rate(batch)
        if self.optim.blr is not None:
            rank_zero_info(f"learning rate {lr:g} = blr {self.optim.blr:g} x global batch {batch} / 256")
        if (warmup := self.optim.warmup(epoch)) >= total:
            flag = self.optim.flags()[1]
            rank_zero_info(f"warning: the run ends at step {total:g}, in its warm-up of {warmup:g} steps: lower {flag}")
        optimizer = self.optim.build(self.net, lr, own_parameters(self))
        scheduler = Schedule(optimizer, lambda step: self.optim.factor(step, total, epoch, self.optim.min_lr / lr))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _logs_this_step(self) -> bool:
        every = self.trainer.log_every_n_steps
        return every > 0 and (self.trainer.global_step + 1) % every == 0  # Lightning counts this step only at its end

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        logged = self._logs_this_step()
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        if logged:
            self.raise_if_not_finite()
            self._utilisation.measure()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if isinstance(self.trainer.strategy, Sharded):
            average_gradients(own_parameters(self))
        losses, self._losses = self._losses, []
        if self._logs_this_step():
            # Mean over the whole global batch: each micro-batch and each rank has only some of the noise levels.
            for name in losses[0]:
                self.log(name, torch.stack([values[name] for values in losses]).mean(), sync_dist=True)
            # Lightning would copy a number to the device, but leaves a tensor where it is.
            self.log("train/lr", torch.tensor(optimizer.param_groups[0]["lr"]))

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: GradClipAlgorithmType | None = None,
    ) -> None:
        """Clip the gradient, and log its norm before.

        Lightning refuses to clip for a fused optimizer under bf16-mixed, though bfloat16 has no scaler to undo.
        """
        logged = self._logs_this_step()
        norm = clip(optimizer, gradient_clip_val or 0.0, gradient_clip_algorithm or "norm", logged)
        if logged:
            self.log("train/grad_norm", norm)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log the speed, and restart the clock after all callbacks, so that their time does not count as training."""
        if self._utilisation.speed:
            self.log_dict({name: torch.tensor(value) for name, value in self._utilisation.figures().items()})
            # Lightning's `prog_bar` would wait for the device at every batch.
            for name in ("train/loss", "train/images_per_second"):
                self.trainer.progress_bar_metrics[name] = float(self.trainer.callback_metrics[name])
            for line in self.auxiliary.remarks(self.trainer.callback_metrics):
                rank_zero_info(line)
            self._utilisation.restart()

    def on_train_start(self) -> None:
        if self.trainer.loggers and not self.trainer.fast_dev_run:
            self._utilisation.start(self)
        self._utilisation.restart()
        self._losses = []

    def _guard(self, bad: Tensor) -> None:
        """Record the first step that is to stop the run, without waiting for the device; `bad` is a bool on it."""
        step = torch.where(bad, self.trainer.global_step, NEVER)
        self._bad_step = step if self._bad_step is None else torch.minimum(self._bad_step, step)
        if bad.device.type == "cpu" and self.trainer.world_size == 1:
            self.raise_if_not_finite()

    def raise_if_not_finite(self) -> None:
        """Raise a UserError if a loss since the start was NaN or infinite on any rank; all ranks must call this."""
        ours = torch.tensor(NEVER, device=self.device) if self._bad_step is None else self._bad_step
        step = int(self.trainer.strategy.reduce(ours, reduce_op="min"))
        if step < NEVER:
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            raise UserError(f"the loss is not finite at step {step} (learning rate {rate:.3g}); {_advice(self.optim)}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.raise_if_not_finite()
        own = [parameter for _, parameter in own_parameters(self)]
        check_finite(self.trainer, [*self.net.parameters(), *own], "weights")
        checkpoint[KEY] = self.card().to_dict()
        checkpoint["settings"] = self.settings
        checkpoint["images_seen"] = self.images_seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check the checkpoint, in fit report settings that differ, and replace Lightning's counters."""
        data, trains = self.data, self.trainer.state.fn == "fit"
        if not isinstance(data, ImageData):
            check(checkpoint, self, "the checkpoint", trains, positioned=False)
            self._before = checkpoint["global_step"], checkpoint.get("images_seen", 0)
            return
        card = check(checkpoint, self, "the checkpoint", trains)
        check_data(card, data, self.net.num_classes > 0, self.allowed)
        if trains and (different := other_settings(checkpoint, card, self, data)):
            rank_zero_info(f"other settings than the checkpoint's: {different}")
        step = checkpoint["global_step"]
        self._before = step, checkpoint.get("images_seen", step * data.batch_size)
        epoch, total = run_length(self.trainer)
        if trains and step >= total > 0:
            flag = "max_steps" if total == self.trainer.max_steps else "max_epochs"
            raise RunEnded(f"the checkpoint is at step {step}, the end of the run: set --trainer.{flag} higher")
        restore_counters(checkpoint, self.trainer, epoch, data.micro_batches)


def check_finite(trainer: Trainer, tensors: Iterable[Tensor], what: str) -> None:
    """Raise a UserError on all ranks if the tensors of any rank hold NaN or infinity; all ranks must call this."""
    finite = torch.stack([torch.isfinite(local(tensor.detach())).all() for tensor in tensors]).all()
    if trainer.strategy.reduce_boolean_decision(not finite, all=False):
        advice = _advice(trainer.lightning_module.optim)
        raise UserError(f"the {what} are not finite at step {trainer.global_step}; {advice}")


def _flags_for(data: ImageData, name: str, of_data: int, of_net: int) -> str:
    """Return the flags of which one lets the network and the data agree on `name`, the data's first."""
    of_model = f"--model.net.{name} {of_data}"
    return f"--data.{name} {of_net} (or {of_model})" if name in data.adjustable else of_model


def _advice(optim: Optimization) -> str:
    rate, warmup = optim.flags()
    return f"the last good checkpoint is kept: lower {rate}, lengthen {warmup} or set --trainer.gradient_clip_val"
