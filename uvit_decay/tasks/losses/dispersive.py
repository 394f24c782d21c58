"""Dispersive loss: the images of a batch push one another's states apart (Wang and He, arXiv 2506.09027)."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.data.batches import Batch
from uvit_decay.data.datamodule import ImageData
from uvit_decay.nn.intermediates import layer_indices
from uvit_decay.tasks.loader_data import LoaderData
from uvit_decay.tasks.losses.auxiliary import AuxiliaryLoss
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Within, check_types

Version = Literal["jax", "pytorch"]
Length = Literal["kept", "free"]
# Version of the authors' code -> weight and tau; the layer is block L/4 in JAX, the last block in PyTorch.
VERSIONS = {"jax": (0.5, 0.5), "pytorch": (0.25, 1.0)}


@check_types
class DispersiveLoss(AuxiliaryLoss):
    """Contrastive loss without positive pairs, on the state after one block (InfoNCE form of the paper).

        d_ij = |z_i - z_j|^2 / (n d),   loss = log( 1/B^2 sum_ij exp(-d_ij / tau) )

    z_i are all tokens and channels of image i, without a norm. The B zeros of the diagonal are included, so the loss is
    never below -log B. The B images are one micro-batch of one process, as in the authors' code: B is part of the
    recipe, of the name in logs, and of the checkpoint. The gradient of a pair is proportional to exp(-d_ij / tau): it
    vanishes if the states are farther apart than a few tau. The logged `gradient_left` is the share that is left.

    The loss rewards long states, and so distinguishes a decayed network, whose stream is short, from its `gain` form.
    `length: free` first divides the states by their root mean square over the batch: an unpublished control.
    The paper reports FID 32.35 instead of 36.49 for SiT-B/2 (ImageNet-256, 80 epochs, no guidance).

    Args:
        version: defaults of the authors' JAX code (weight 0.5, tau 0.5, block L/4; 16 images) or PyTorch code (weight
            0.25, tau 1, last block; 32 images).
        layer: name or number of the layer, number i is the state after block i; null: by version.
        tau: temperature, above 0; null: by version.
        weight: factor of this loss in the loss of a step, not negative; null: by version.
        length: `kept` uses states as they are, `free` divides them by their root mean square over the batch.

    Raises:
        UserError: in training, if micro-batches have one image, or not as many as those of a resumed run's checkpoint.
    """

    def __init__(
        self,
        version: Version = "jax",
        layer: str | int | None = None,
        tau: Annotated[float | None, Within("(0, inf)")] = None,
        weight: float | None = None,
        length: Length = "kept",
    ) -> None:
        default_weight, default_tau = VERSIONS[version]
        super().__init__(None, default_weight if weight is None else weight)
        self.version = version
        self.layer = layer
        self.length = length
        self.tau = default_tau if tau is None else tau
        self.images = 0  # B, known after `prepare`
        self.register_buffer("stored_images", torch.tensor(0))  # B in checkpoints; 0 before it is known
        self.register_load_state_dict_post_hook(DispersiveLoss.check_images)  # a lambda has no pickle

    @property
    def name(self) -> str:
        """Name in logs: dispersive, the number of images in the loss, and `_free` for states of free length."""
        suffix = "_free" if self.length == "free" else ""
        return f"dispersive{self.images}{suffix}"

    def bind(self, net: nn.Module) -> None:
        """Find the layer of the network."""
        super().bind(net)
        layer = self.layer
        if layer is None:
            depth = len(net.layers) - 1
            layer = max(1, depth // 4) if self.version == "jax" else depth
        self.layers = layer_indices(net.layers, [str(layer)])

    def prepare(self, data: ImageData | LoaderData, images: int) -> None:
        """Store the number of images of a micro-batch; raise a UserError if the checkpoint has another number."""
        if images < 2:
            raise UserError(
                "DispersiveLoss compares images, a micro-batch has 1: set `batch_size` or `device_batch_size`"
            )
        self.images = images
        self.check_images()
        self.stored_images.fill_(images)

    def check_images(self, *_: object) -> None:
        """Raise a UserError if a checkpoint was trained with micro-batches of another size."""
        stored = int(self.stored_images)
        if self.images and stored not in (0, self.images):
            raise UserError(
                f"the checkpoint's DispersiveLoss compares {stored} images, this run compares {self.images}: "
                f"set `batch_size` and `device_batch_size` so that a micro-batch has {stored}"
            )

    def forward(
        self, states: dict[str, Float[Tensor, "b n d"]], batch: Batch, times: Float[Tensor, " b"] | None
    ) -> Float[Tensor, ""]:
        (state,) = states.values()
        with torch.autocast(state.device.type, enabled=False):
            z = state.float().flatten(1)
            if self.length == "free":
                z = z / z.square().mean().sqrt()
            distances = torch.pdist(z).square() / z.shape[1]  # each pair once
            count = len(z)
            # sum_ij exp(-d_ij / tau) = B + 2 sum over pairs
            pairs = math.log(2) + torch.logsumexp(-distances / self.tau, dim=0)
            total = torch.logaddexp(pairs, pairs.new_tensor(math.log(count)))
            self.figures = {
                "distance": distances.detach().mean(),
                "gradient_left": (pairs - total).detach().exp(),
            }
            return total - 2 * math.log(count)
