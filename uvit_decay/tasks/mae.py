"""Pre-training of masked autoencoders (He et al., CVPR 2022)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from uvit_decay.data.batches import Batch
from uvit_decay.nn.mae import MAE, visible_patches
from uvit_decay.runtime.random import uniform
from uvit_decay.tasks.base import AUTO, Optimization, Task
from uvit_decay.tasks.losses.auxiliary import AuxiliaryLoss
from uvit_decay.terminal.typed import check_types


@check_types
class MAETask(Task):
    """Pre-training of a masked autoencoder: the mean squared error of the patches that it does not see.

    The mask of an image is a function of (seed, step, position in the global batch), the same on any number of
    processes and micro-batches. In validation it is a function of (seed, number of the image).

    Args:
        net: the masked autoencoder.
        mask_ratio: share of the patches that are removed, in (0, 1).
        optim: optimizer and learning rate; MAE's are blr 1.5e-4, betas 0.9 and 0.95, weight_decay 0.05 on matrices,
            warmup_epochs 40 and the cosine schedule.
        compile: see `Task`.
        seed: seed of the masks.
        auxiliary: see `Task`; the states are of the encoder.
        init_from: a .ckpt or .safetensors of this project, or an official file, whose weights the network starts
            from; see `adapt`. Channels and image size may differ. Not read when a run resumes.
    """

    def __init__(
        self,
        net: MAE,
        mask_ratio: float = 0.75,
        optim: Optimization = Optimization(),  # noqa: B008  frozen
        compile: bool | str = AUTO,
        seed: int = 0,
        init_from: str | Path | None = None,
        auxiliary: list[AuxiliaryLoss] | None = None,
    ) -> None:
        super().__init__(net, optim, compile, seed, auxiliary)
        self.init_from = init_from
        visible_patches(net.patch_embed.tokens, mask_ratio)
        self.mask_ratio = mask_ratio

    def loss(self, batch: Batch, stage: str) -> Tensor:
        """Return the mean loss of a part of a global batch; all its images have the same number of removed patches."""
        noise = uniform("mask", stage, self.seed, rows=batch.sample_ids, shape=(self.net.patch_embed.tokens,))
        net = self.observed(batch)
        prediction, mask = net(batch.images, noise, self.mask_ratio)
        return self.net.reconstruction_loss(batch.images, prediction, mask)
