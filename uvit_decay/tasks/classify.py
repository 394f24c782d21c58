"""Training of classifiers: linear probes of frozen encoders, fine-tuning, and supervised training from scratch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from jaxtyping import Float
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from uvit_decay.checkpoint.io import load
from uvit_decay.checkpoint.options import Weights
from uvit_decay.data.augment import global_seeds
from uvit_decay.data.batches import Batch
from uvit_decay.runtime.random import generator, uniform
from uvit_decay.tasks.base import AUTO, Optimization, Task
from uvit_decay.tasks.init_from import Classifier, head_module
from uvit_decay.tasks.loader_data import LoaderData
from uvit_decay.terminal.errors import UserError, require_shape, with_flags
from uvit_decay.terminal.typed import Share, Within, check_types


@check_types
class ClassifyTask(Task):
    """Training of a classifier net(x) -> logits by cross-entropy.

    Logs val/loss, val/top1 and val/top5 of all test images, each once, and prints the last ones at the end.

    Args:
        net: the network, see `Task`; `linear_head` is the linear layer of its classifier.
        frozen: train only the classifier, on features of a frozen encoder (a linear probe); all other modules are in
            evaluation mode. A batch norm in the classifier is trained, too.
        init_from: a .ckpt or .safetensors of this project, or an official file, whose encoder the network starts from;
            see `adapt`. Not read when a run resumes.
        drop_path: stochastic depth: probability that a residual branch of the last block is dropped for an image, in
            [0, 1); it rises from 0 linearly over the blocks.
        mixup: Beta parameter of Mixup, see `Mixing`; 0 for none.
        cutmix: Beta parameter of CutMix; 0 for none.
        switch_prob: probability of CutMix if both are given.
        label_smoothing: share of the target that is spread over all classes, in [0, 1).
        optim: optimizer and learning rate. MAE's linear probe: lars, blr 0.1, weight_decay 0, warmup_epochs 10, cosine;
            fine-tuning: adamw, blr 5e-4, betas 0.9 and 0.999, weight_decay 0.05 on layers, layer_decay 0.65,
            warmup_epochs 5, min_lr 1e-6, cosine.
        compile: see `Task`.
        seed: seed of a new classifier, stochastic depth, Mixup and CutMix.

    The classifier starts from a truncated normal(0, 0.01) if the encoder is frozen, and from normal(0, 2e-5) if it is
    fine-tuned (MAE). Batch norms see one micro-batch on one device, as in MAE's code. Their running statistics are
    averaged over the devices before they are used or saved.
    """

    def __init__(
        self,
        net: nn.Module,
        frozen: bool = False,
        init_from: str | Path | None = None,
        drop_path: Annotated[float, Within("[0, 1)")] = 0.0,
        mixup: Annotated[float, Within("[0, inf)")] = 0.0,
        cutmix: Annotated[float, Within("[0, inf)")] = 0.0,
        switch_prob: Share = 0.5,
        label_smoothing: Annotated[float, Within("[0, 1)")] = 0.0,
        optim: Optimization = Optimization(),  # noqa: B008  frozen
        compile: bool | str = AUTO,
        seed: int = 0,
    ) -> None:
        super().__init__(net, optim, compile, seed)
        if not isinstance(net, Classifier):
            raise UserError(f"a {type(net).__name__} is not a classifier: set `net` to a ViT or a ResNet")
        self.frozen = frozen
        self.init_from = init_from
        self._has_initial = init_from is not None
        self.drop_path = drop_path
        self.label_smoothing = label_smoothing
        self.mixing: Mixing | None = None
        if mixup or cutmix:
            self.mixing = Mixing(mixup, cutmix, switch_prob, label_smoothing, net.num_classes, seed)
        self._last = ""  # result of the last validation
        self._sums = torch.zeros(4)
        self._head = head_module(net)
        if frozen:
            net.requires_grad_(False)
            net.linear_head.requires_grad_(True)
        if frozen or init_from:
            std = 0.01 if frozen else 2e-5
            nn.init.trunc_normal_(net.linear_head.weight, std=std, generator=generator("head", seed))
            nn.init.zeros_(net.linear_head.bias)

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path, weights: Weights | None = None, trusted: Sequence[str] = (), **given: Any
    ) -> Self:
        """Return a task with the network of a checkpoint and its classifier, in eval mode; arguments as in `Task`."""
        net = load(Path(checkpoint_path), weights, trusted).net
        stored = copy.deepcopy(net.state_dict())
        task = cls(net, **given).eval()
        net.load_state_dict(stored)  # `frozen` and `init_from` begin with a new classifier
        return task

    def setup(self, stage: str) -> None:
        """Check the data, and load the weights from which a new run starts."""
        data = self.data
        if isinstance(data, LoaderData):
            raise UserError("a ClassifyTask takes no DataLoader: pass a data module of uvit_decay.data to Trainer.fit")
        if len(data.class_names) < 2:
            raise UserError(f"{data.name} has {len(data.class_names)} classes, a classifier needs two or more")
        super().setup(stage)
        data.whole_test = True
        images = data.batch_size // self.trainer.world_size // data.micro_batches
        if self.mixing and images % 2:
            sizes = "change `batch_size` or `device_batch_size`"
            raise UserError(f"mixup and cutmix mix neighbours, and a micro-batch of {images} images is odd: {sizes}")
        needs_weights = self.frozen or self.optim.layer_decay < 1
        if stage == "fit" and needs_weights and not self._has_initial and self.trainer.ckpt_path is None:
            recipe = "a frozen encoder" if self.frozen else "layer decay"
            line = f"{recipe} without `init_from`: the network has random weights, unless you loaded others"
            rank_zero_info(with_flags(line))

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Keep a frozen encoder in evaluation mode, also if callbacks changed it."""
        if self.frozen:
            self.net.eval()
            self.net.get_submodule(self._head).train()

    def loss(self, batch: Batch, stage: str) -> Tensor:
        """Return the mean cross-entropy of a part of a global batch; images and labels are mixed in training.

        All random numbers are functions of (seed, `batch.sample_ids`) or (seed, number of the global batch).
        """
        if stage != "train":
            return cross_entropy(self.logits(batch.images), batch.labels)
        images, targets, smoothing = batch.images, batch.labels, self.label_smoothing
        if self.mixing:
            images, targets = self.mixing(batch)
            smoothing = 0.0  # the targets are smoothed
        logits = self.logits(images, self.draw_factors(batch)) if self.drop_path else self.logits(images)
        return cross_entropy(logits.float(), targets, label_smoothing=smoothing)

    def logits(self, images: Tensor, *factors: Tensor) -> Float[Tensor, "b classes"]:
        """Return the network's logits; raise a UserError if they have another shape."""
        logits = self.net(images, *factors)
        require_shape((len(images), self.net.num_classes), logits=logits)
        return logits

    def draw_factors(self, batch: Batch) -> Float[Tensor, "branches b"]:
        """Draw factors of the 2 L residual branches: 0 for a dropped branch, otherwise 1 / (1 - its rate)."""
        depth = len(self.net.blocks)
        rates = torch.linspace(0, self.drop_path, depth, device=batch.images.device).repeat_interleave(2)
        numbers = uniform("drop path", self.seed, rows=batch.sample_ids, shape=(2 * depth,))
        kept = numbers >= rates
        return (kept / (1 - rates)).T

    def on_validation_epoch_start(self) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add up losses, hits and images; images that only fill the last batch do not count."""
        logits = self.logits(batch.images).float()
        losses = cross_entropy(logits, batch.labels, reduction="none")
        hits = logits.topk(min(5, logits.shape[1])).indices == batch.labels[:, None]
        counts = torch.stack([losses, hits[:, 0], hits.any(dim=1), torch.ones_like(losses)]).double()
        is_image = batch.sample_ids < len(self.trainer.datamodule.test)
        self._sums += (counts * is_image).sum(dim=1)

    def on_validation_epoch_end(self) -> None:
        loss, top1, top5, images = self.trainer.strategy.reduce(self._sums, reduce_op="sum").tolist()
        values = {"loss": loss / images, "top1": top1 / images, "top5": top5 / images}
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            shares = ", ".join(f"{name} {100 * values[name]:.2f} %" for name in ("top1", "top5"))
            self._last = f"{shares} of {images:.0f} test images at step {self.trainer.global_step}"
        for name, value in values.items():
            self.log(f"val/{name}", value, prog_bar=name in ("loss", "top1"), sync_dist=True)

    def on_train_end(self) -> None:
        if self._last:
            rank_zero_info(f"last validation: {self._last}")

    def on_validation_start(self) -> None:
        self.sync_batch_norms()

    def sync_batch_norms(self) -> None:
        """Average the running statistics of batch norms over all ranks; all ranks must call this."""
        if self.trainer.world_size > 1:
            from timm.utils import distribute_bn  # takes seconds to import

            distribute_bn(self.net, self.trainer.world_size, reduce=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.sync_batch_norms()
        super().on_save_checkpoint(checkpoint)


class Mixing:
    """Mix every image of a batch with its neighbour, 2k with 2k + 1, with one proportion for the global batch.

    Neighbours are on one device, so that the result does not depend on how the global batch is divided. MAE's code
    draws kind and proportion for each batch of 32 on a device.

    Args:
        mixup: Beta parameter of Mixup; 0 for none.
        cutmix: Beta parameter of CutMix; 0 for none.
        switch_prob: probability of CutMix if both are given.
        label_smoothing: see `ClassifyTask`.
        num_classes: classes K.
        seed: seed of the proportions and of CutMix's boxes.
    """

    def __init__(
        self, mixup: float, cutmix: float, switch_prob: float, label_smoothing: float, num_classes: int, seed: int
    ) -> None:
        from timm.data.mixup import Mixup  # takes seconds to import

        options = {"switch_prob": switch_prob, "label_smoothing": label_smoothing, "num_classes": num_classes}
        self.mix = Mixup(mixup, cutmix, mode="batch", **options)
        self.seed = seed

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return mixed images (b, c, h, w) and their targets, float32 (b, K); b is even."""
        count = len(batch.images)
        device = batch.images.device
        # timm mixes image i with image b - 1 - i: this order makes them neighbours of the batch.
        order = torch.cat([torch.arange(0, count, 2), torch.arange(1, count, 2).flip(0)])
        there = order.to(device, non_blocking=True)
        back = order.argsort().to(device, non_blocking=True)
        word = generator("mix", self.seed, batch.number).initial_seed() % 2**32  # numpy takes 32 bits
        with global_seeds((word, word)):
            images, targets = self.mix(batch.images[there], batch.labels[there])
        return images[back], targets[back]
