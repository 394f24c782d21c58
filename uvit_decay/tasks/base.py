"""Base class of the training tasks: optimizer, learning-rate schedule, checks and logged numbers of a step.

A step, in order; Lightning calls these hooks. Step k trains on global batch k.

1. Batch: `StepLoader` yields a micro-batch of this rank's share of global batch k, a function of (seed, k); the
   data module moves it to the device and brings it into the form of the network, float32 in about [-1, 1].
2. Random numbers: times, label dropout and noise are functions of (seed, k, position in the global batch) alone.
3. Loss: `training_step` returns the mean of `loss` over the micro-batch.
4. Guard: `LossGuard` records on the device whether loss and images are finite; only a single process on the CPU raises
   at once. In float16 (16-mixed) only images count, because the optimizer's step is skipped if the loss is not finite.
5. Accumulation: the backward pass adds the gradients, divided by the number of micro-batches; 1 to 5 repeat for each
   micro-batch. The gradients are averaged over the ranks.
6. Numbers: `on_before_optimizer_step` logs loss and learning rate every --trainer.log_every_n_steps. With several
   processes it checks that each trained parameter has a gradient.
7. Clipping: `configure_gradient_clipping` computes the gradient norm once, logs it, and clips by
   --trainer.gradient_clip_val, if it is set.
8. Optimizer: its step. In float16 it is skipped if the gradient is not finite; see `SkippedSteps`. At logged steps the
   guard is read on all ranks, and raises if a loss was not finite.
9. Schedule: it sets the learning rate of the next step.
10. EMA: the average is updated with the new weights, unless the step was skipped.
11. Checkpoint: `LastCheckpoint` saves if one is due, unless a loss, a weight or an average is not finite.
12. Evaluation: previews, metrics and probes that are due run on the EMA weights if the run keeps them. If one fails,
    the checkpoint of this step is already saved. At logged steps the clock of train/images_per_second restarts
    afterwards. Validation follows if it is due.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from uvit_decay.checkpoint.detect import KEY
from uvit_decay.checkpoint.io import ModelCard, StoredModel, load
from uvit_decay.checkpoint.options import Weights
from uvit_decay.data.batches import Batch
from uvit_decay.data.classes import class_hash
from uvit_decay.data.datamodule import ImageData
from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.files.instantiate import Spec
from uvit_decay.files.validation import check_compile
from uvit_decay.nn.base import check_attributes
from uvit_decay.runs.restore import log_short_run, restore_run, run_length
from uvit_decay.runs.resumable import Start
from uvit_decay.runs.settings import Settings
from uvit_decay.runtime.precision import check_training_precision
from uvit_decay.tasks.finite import LossGuard, check_finite
from uvit_decay.tasks.init_from import adapt, read_initial
from uvit_decay.tasks.loader_data import LoaderData, check_match
from uvit_decay.tasks.losses.auxiliary import PREFIX, AuxiliaryLoss, AuxiliaryLosses, Observed
from uvit_decay.tasks.optim.clipping import clip
from uvit_decay.tasks.optim.options import Optimization, Schedule
from uvit_decay.tasks.optim.scaling import SkippedSteps, check_sharded, scales
from uvit_decay.tasks.own_parameters import name_own_state, own_parameters
from uvit_decay.tasks.parallel.compilation import compile_net
from uvit_decay.tasks.parallel.ddp import check_gradients
from uvit_decay.tasks.parallel.sharding import Sharded, average_gradients, original_class
from uvit_decay.tasks.utilisation import Utilisation
from uvit_decay.terminal.errors import UserError, check_whole, with_flags

AUTO = "auto"


class Task(LightningModule):
    """Base class of tasks that train `net`.

    Logs train/loss, train/lr, train/grad_norm, train/images_per_second, train/mfu and train/memory_gib, train/aux/* for
    auxiliary losses, and train/skipped_steps in float16. Stops if a loss is not finite; in float16 see `SkippedSteps`.

    A subclass defines `loss`. It may extend `setup`, which checks the data before training, and `function_spec`, the
    description of the trained function: checkpoints record it, and a resumed run must have the same.

    A task trains all parameters that it holds. Parameters beside `net` that need gradients, such as a projector's, have
    the learning rate of the run and the weight decay that `decay_on` gives for their shape. They are stored, restored
    and clipped like the network's parameters. If there are several processes, each must get a gradient in every step.
    Modules with trained parameters are built in the constructor. A frozen module (requires_grad False) is neither
    trained nor stored. Averages (EMA), samples, exports and model cards are of `net` alone.

    Args:
        net: the network, with the attributes of `uvit_decay.nn.base.ImageNetwork`.
        optim: optimizer and learning rate.
        compile: compile the network in place with torch.compile: true, or the name of a backend. Checkpoints, probes
            and sampling work as without it. `auto` is true on CUDA GPUs, and false on CPUs, where it takes a minute to
            gain up to a fifth. On GPUs, and if it is sharded, the network is compiled block by block.
        seed: seed of all random numbers of training.
        auxiliary: further losses, of the token states of the network; see `AuxiliaryLoss`.
    """

    path: NoisePath | None = None  # noise path of a denoiser
    sampling: Sampling | None = None  # default sampling of a denoiser
    init_from: str | Path | None = None  # file whose weights `load_initial` reads

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
        check_whole(0, 2**63 - 1, seed=seed)
        self.net = net
        self.optim = optim
        self.seed = seed
        self.auxiliary = AuxiliaryLosses(auxiliary or [], net)
        name_own_state(self)
        self.settings: Settings = {}  # all flags of the run, if the program sets them; compared on resumption
        self.allowed: Sequence[str] = ()  # settings that may differ from the checkpoint, --resume.allow
        self.trust_flags = ""  # such as " --trust mine", which commands that read the checkpoints of the run need
        self.start: Start | None = None  # the checkpoint from which the run resumes, if the program sets it
        check_compile(compile, AUTO)
        self._backend = "inductor" if compile is True else compile
        self._guard = LossGuard()
        self.skipped = SkippedSteps()
        self._losses: list[dict[str, Tensor]] = []  # by name in logs, since the last optimizer step
        self._observing = False  # within a training step with auxiliary losses
        self._observed: Observed | None = None  # the network in such a step
        self._loader_data: LoaderData | None = None
        self._initial: StoredModel | None = None  # read, and not yet loaded
        self._start_step = 0  # of the checkpoint from which the run resumed
        self._start_images = 0  # training images until then
        self._utilisation = Utilisation()

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path, weights: Weights | None = None, trusted: Sequence[str] = (), **given: Any
    ) -> Self:
        """Return a task with the network of a checkpoint, in eval mode.

        To resume the run of a checkpoint, give it to `Trainer.fit` as `ckpt_path`.

        Args:
            checkpoint_path: file or folder, see `uvit_decay.checkpoint.load`.
            weights: see `uvit_decay.checkpoint.load`.
            trusted: see `uvit_decay.checkpoint.load`.
            given: further arguments of the task, such as `optim`.
        """
        model = load(Path(checkpoint_path), weights, trusted)
        return cls(model.net, **given).eval()

    def configure_model(self) -> None:
        """Compile the network, once for all fits; only here are its device and whether it will be sharded known."""
        backend = self._backend
        self._backend = False
        strategy = self.trainer.strategy
        on_gpu = strategy.root_device.type == "cuda"
        if backend == AUTO:
            backend = "inductor" if on_gpu and find_spec("triton") is not None else False
        if backend:
            compile_net(self.net, backend, by_block=on_gpu or isinstance(strategy, Sharded))

    def load_initial(self) -> None:
        """Read the file from which a new run starts, once; before a run resumes, `init_from` is set to None.

        Its weights are loaded in `setup`, where the classes of the data are known.
        """
        if self.init_from is not None:
            file = Path(self.init_from)
            self.init_from = None
            self._initial = read_initial(file, self.net, self.function_spec())

    @property
    def images_seen(self) -> int:
        """Training images so far, over all devices and all parts of a resumed run."""
        steps = self.trainer.global_step - self._start_step
        return self._start_images + steps * self.data.batch_size

    @property
    def data(self) -> ImageData | LoaderData:
        """The data module of this run, or its substitute if a script passes its own loaders."""
        given = self.trainer.datamodule
        if isinstance(given, ImageData):
            return given
        if self._loader_data is None or self._loader_data.trainer is not self.trainer:
            self._loader_data = LoaderData(self.trainer, self.net)
        return self._loader_data

    def sync_batch_norms(self) -> None:
        """Make the network the same on all ranks before it is evaluated or saved; all ranks must call this."""

    def loss(self, batch: Batch, stage: str) -> Tensor:
        """Return the scalar float32 mean loss of a part of a global batch; `stage` is "train" or "val".

        It calls `self.net` once, or, to support auxiliary losses, the network that `observed` returns.
        """
        raise NotImplementedError

    def observed(self, batch: Batch, times: Tensor | None = None) -> nn.Module | Observed:
        """Return the network for `loss`; when a training step calls it, the auxiliary losses get its states.

        Args:
            batch: the part of a global batch whose loss is computed.
            times: noise levels (b,) of the images that the network sees; None for networks without times.
        """
        if not self._observing:
            return self.net
        self._observed = Observed(self.net, self.auxiliary, batch, times)
        return self._observed

    def setup(self, stage: str) -> None:
        """Raise a UserError if data or card do not fit the network; load the weights from which a new run starts."""
        data = self.data
        check_training_precision(self.trainer.precision)
        if isinstance(data, ImageData):
            check_match(self.net, data)
        check_sharded(self.trainer, self.optim)
        if stage != "fit":
            return
        # A card that could not be read back is refused now, not at the first checkpoint.
        ModelCard(**self.function_spec(), sampling=self.sampling, class_names=(), data=data.name, step=0).to_dict()
        for loss in self.auxiliary:
            loss.prepare(data, data.batch_size // (self.trainer.world_size * data.micro_batches))
        if isinstance(data, ImageData) and data.test is None:
            self.trainer.limit_val_batches = 0  # Lightning would warn about an empty list
        if self.trainer.ckpt_path is None:
            self.load_initial()
            if self._initial is not None:
                rank_zero_info("\n".join(adapt(self.net, self._initial, self.function_spec(), data)))
                self._initial = None

    def run_length(self) -> tuple[float, float]:
        """Return the optimizer steps of an epoch and of the whole run; either may be infinite."""
        data = self.data
        return run_length(self.trainer) if isinstance(data, ImageData) else data.run_length()

    def function_spec(self) -> dict[str, Any]:
        """Return the fields of `card` that define the trained function; they do not depend on the data."""
        return {"net": Spec.of(original_class(self.net), self.net.config)}

    def card(self) -> ModelCard:
        """Return the model card, which is stored in the checkpoint: the network, and the data of this run."""
        data = self.data
        return ModelCard(
            **self.function_spec(),
            sampling=self.sampling,
            class_names=tuple(data.class_names) if self.net.num_classes else (),
            class_hash=class_hash(data.class_names) if isinstance(data, ImageData) else None,
            data=data.name,
            latents=data.latents,
            step=self.trainer.global_step,
            data_hash=data.fingerprint,
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        batch = self._to_batch(batch, batch_idx, trains=True)
        loss, auxiliary = self._compute_losses(batch)
        total = loss
        logged = {"train/loss": loss}
        if auxiliary:
            total = loss + self.auxiliary.sum_weighted(auxiliary)
            for name, value in (auxiliary | self.auxiliary.figures()).items():
                logged[f"{PREFIX}{name}"] = value
        self._guard.record(total, batch.images, self.trainer.global_step, scales(self.trainer))
        if total.device.type == "cpu" and self.trainer.world_size == 1:
            self.raise_if_not_finite()
        self._utilisation.images += len(batch.images) * self.trainer.world_size
        self._losses.append({name: value.detach().float() for name, value in logged.items()})
        return total

    def _to_batch(self, given: Any, index: int, trains: bool) -> Batch:
        """Return a batch of a data module unchanged, and a batch of a script's own loader as a `Batch`."""
        if isinstance(given, Batch):
            return given
        return self.data.batch(given, index, trains)

    def _compute_losses(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the task, and the auxiliary losses by name without their weights."""
        if not len(self.auxiliary):
            return self.loss(batch, "train"), {}
        self._observing = True
        try:
            loss = self.loss(batch, "train")
            if self._observed is None or not self._observed.values:
                kind = type(self).__name__
                raise UserError(f"{kind}.loss does not call the network that `observed` returns", argument="auxiliary")
            return loss, self._observed.values
        finally:
            self._observing = False
            self._observed = None

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        batch = self._to_batch(batch, batch_idx, trains=False)
        self.log("val/loss", self.loss(batch, "val"), prog_bar=True, sync_dist=True, batch_size=len(batch.images))

    def configure_optimizers(self) -> dict[str, Any]:
        data = self.data
        optim = self.optim
        epoch, total = self.run_length()
        if not self.trainer.fast_dev_run:  # a trial of a step or two is shorter than the schedule
            optim.check_length(total, epoch)
        lr = optim.rate(data.batch_size)
        for line in optim.remarks(data.batch_size, total, epoch):
            rank_zero_info(with_flags(line))
        optimizer = optim.build(self.net, lr, own_parameters(self), fused=not scales(self.trainer))
        self.skipped.watch(optimizer, self.trainer)
        scheduler = Schedule(optimizer, lambda step: optim.factor(step, total, epoch, optim.min_lr / lr))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def group_parameters(self, lr: float) -> list[dict[str, Any]]:
        """Return the optimizer's groups of all trained parameters, see `Optimization.groups`."""
        return self.optim.groups(self.net, lr, own_parameters(self))

    def _logs_this_step(self) -> bool:
        every = self.trainer.log_every_n_steps
        return every > 0 and (self.trainer.global_step + 1) % every == 0  # Lightning counts this step only at its end

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        logged = self._logs_this_step()
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        self.skipped.count(self)
        if logged:
            self.raise_if_not_finite()
            self._utilisation.measure()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if isinstance(self.trainer.strategy, Sharded):
            average_gradients(own_parameters(self))
        else:
            check_gradients(self, optimizer)
        losses = self._losses
        self._losses = []
        if not self._logs_this_step():
            return
        # Mean over the whole global batch: each micro-batch and each rank has only some of the noise levels.
        for name in losses[0]:
            values = torch.stack([logged[name] for logged in losses])
            self.log(name, values.mean(), sync_dist=True)
        self.log("train/lr", torch.tensor(optimizer.param_groups[0]["lr"]))  # a number would be copied to the device

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: GradClipAlgorithmType | None = None,
    ) -> None:
        """Clip the gradient, and log its norm before clipping.

        Lightning refuses to clip for a fused optimizer under bf16-mixed, although bfloat16 needs no gradient scaler.
        """
        logged = self._logs_this_step()
        norm = clip(optimizer, gradient_clip_val or 0.0, gradient_clip_algorithm or "norm", logged)
        if logged:
            self.log("train/grad_norm", norm)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log the speed, and restart the clock after all callbacks, so that their time does not count as training."""
        if not self._utilisation.speed:
            return
        for name, value in (self._utilisation.figures() | self.skipped.figures(self.trainer)).items():
            self.log(name, torch.tensor(value))
        # Lightning's `prog_bar` would wait for the device at every batch.
        for name in ("train/loss", "train/images_per_second"):
            self.trainer.progress_bar_metrics[name] = float(self.trainer.callback_metrics[name])
        self._utilisation.restart()

    def on_train_start(self) -> None:
        log_short_run(self.trainer)
        if self.trainer.loggers and not self.trainer.fast_dev_run:
            self._utilisation.start(self)
        self._utilisation.restart()
        self._losses = []

    def raise_if_not_finite(self) -> None:
        """Raise a UserError if a loss since the start was NaN or infinite on any rank; all ranks must call this."""
        self._guard.raise_if_not_finite(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.raise_if_not_finite()
        own = [parameter for _, parameter in own_parameters(self)]
        check_finite(self.trainer, [*self.net.parameters(), *own], "weights")
        checkpoint[KEY] = self.card().to_dict()
        checkpoint["settings"] = self.settings
        checkpoint["images_seen"] = self.images_seen
        self.skipped.save(checkpoint, self.trainer)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check the checkpoint, print settings that differ, and replace Lightning's counters; see `restore_run`."""
        self._start_images = restore_run(checkpoint, self)
        self._start_step = checkpoint["global_step"]
        self.skipped.restore(checkpoint, self.trainer)
