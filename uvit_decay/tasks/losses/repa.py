"""REPA: a denoiser's states predict the features of a frozen encoder (Yu et al., ICLR 2025), and iREPA's variant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, interpolate

from uvit_decay.data.batches import Batch
from uvit_decay.data.datamodule import ImageData
from uvit_decay.encoders.networks import ProbedNetwork, final_norm, fit_pictures, open_network
from uvit_decay.generation.options import LoadingOptions
from uvit_decay.nn.intermediates import layer_indices
from uvit_decay.nn.mae import MAE
from uvit_decay.tasks.loader_data import LoaderData
from uvit_decay.tasks.losses.auxiliary import AuxiliaryLoss
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Needs, Positive, Share, check_types

ProjectorKind = Literal["mlp", "conv"]
WEIGHT = 0.5  # of the authors of REPA
# Data -> z-score and weight of the authors of iREPA, in their versions for latents and for pixels.
PUBLISHED = {"latents": (0.6, 1.0), "pixels": (0.8, 0.5)}
EPS = 1e-6  # added to iREPA's standard deviation
TEACHER_SIZE = 224  # pixels of the images that timm's encoders see, as in REPA


def open_teacher(name: str, trust: Sequence[str] = ()) -> ProbedNetwork:
    """Open an encoder in eval mode without gradients: a checkpoint or folder of this project, or timm:NAME[=FILE].

    An encoder of timm sees TEACHER_SIZE pixels, to which its positions are interpolated (bicubic, antialiased), as in
    the code of REPA's authors.
    """
    found = open_network(Path(name), LoadingOptions(trust=trust), TEACHER_SIZE)
    if not found.is_encoder:
        raise UserError(f"`teacher` {name} is a denoiser: give an encoder, such as an MAE's checkpoint")
    found.net.eval().requires_grad_(False)
    return found


@check_types
class REPA(AuxiliaryLoss):
    """Negative cosine between projected patch tokens of one block and the patch tokens of a frozen encoder.

        loss = - mean over images and patches of cos(projector(h_k), e(x))

    h_k is the state after block k for the noised image, e(x) the last state of the encoder for the clean image, after
    its final norm if it has one. The encoder sees the augmented images of the batch, without noise. Pictures of another
    size are resized for it (bicubic, antialiased). If its grid of patches differs from the network's, its tokens are
    interpolated to the network's grid (bilinear, antialiased). The encoder is frozen and not stored in checkpoints. The
    projector is trained and stored.

    `mlp` is REPA: three linear layers with SiLU between. `conv` is iREPA (Singh et al., arXiv 2512.10794): one 3x3
    convolution, and targets (e - zscore * mean) / (std + 1e-6), with the mean and the unbiased standard deviation over
    the patches of an image, for each channel.

    The paper of REPA reports FID 7.9 instead of 17.2 for SiT-XL/2 with DINOv2-B (ImageNet-256, 80 epochs, no guidance).
    There the denoiser sees latents and the encoder sees the pixels of the same images. This is not possible here: data
    of latents hold no pixels, so their encoder must be an encoder of the same latents. The effect of a decayed MAE as
    the encoder is not known.

    Args:
        teacher: the encoder: a checkpoint or exported folder of this project, of the same pixels or the same latents,
            or for pixels timm:NAME (weights from the hub's cache or the network) or timm:NAME=FILE, at 224 pixels.
        layer: name or number of the layer; number i is the state after block i. Null: 8 for networks with 24 blocks or
            more, otherwise a third of the depth (4 of 12, as in iREPA for SiT-B).
        projector: `mlp` or `conv`.
        weight: factor of this loss in the loss of a step, not negative. Null: 0.5 for `mlp`; for `conv` 1 for latents
            and 0.5 for pixels.
        hidden: width of the hidden layers of `mlp`.
        trust: modules or classes from elsewhere that the teacher's checkpoint may name, see docs/extending.md.
        zscore: factor of the mean over patches in the targets of `conv`, in [0, 1]. Null: 0.6 for latents and 0.8 for
            pixels, as in the authors' code.
    """

    NEEDS = {"hidden": Needs("projector", "mlp"), "zscore": Needs("projector", "conv")}

    def __init__(
        self,
        teacher: str,
        layer: str | int | None = None,
        projector: ProjectorKind = "mlp",
        weight: float | None = None,
        hidden: Positive = 2048,
        trust: list[str] | None = None,
        zscore: Share | None = None,
    ) -> None:
        super().__init__(None, WEIGHT if weight is None else weight)
        self.layer = layer
        self.kind = projector
        self.hidden = hidden
        self.teacher = open_teacher(teacher, trust or ())  # not a module of this one: neither stored nor trained
        self.where = f"`teacher` {teacher}"
        self.zscore = 0.0
        if projector == "conv":
            default_zscore, default_weight = PUBLISHED[self._sees()]
            self.zscore = default_zscore if zscore is None else zscore
            self.weight = default_weight if weight is None else weight

    def _sees(self) -> str:
        """Return what the encoder sees, latents or pixels."""
        return "latents" if self.teacher.latents else "pixels"

    def bind(self, net: nn.Module) -> None:
        """Find the layer of the network, and build the projector from its width to the encoder's."""
        super().bind(net)
        if isinstance(net, MAE):
            raise UserError("REPA needs the tokens of all patches, and an MAE sees only some of them: use a denoiser")
        self._image_size = net.image_size
        self._channels = net.channels
        layer = self.layer
        if layer is None:
            depth = len(net.layers) - 1
            layer = 8 if depth >= 24 else round(depth / 3)
        self.layers = layer_indices(net.layers, [str(layer)])
        out = self.teacher.net.dim
        if self.kind == "conv":
            self.projector = ConvProjector(net.dim, out)
            return
        first = nn.Linear(net.dim, self.hidden)
        second = nn.Linear(self.hidden, self.hidden)
        self.projector = nn.Sequential(first, nn.SiLU(), second, nn.SiLU(), nn.Linear(self.hidden, out))

    def prepare(self, data: ImageData | LoaderData, images: int) -> None:
        """Raise a UserError if the encoder cannot see the images of the data."""
        ours = "latents" if data.latents else "pixels"
        theirs = self._sees()
        if ours != theirs:
            raise UserError(f"{self.where} sees {theirs}, the data are {ours}: give an encoder of {ours}")
        net = self.teacher.net
        if self.teacher.latents is not None:
            self.teacher.latents.check_same(data.latents, self.where, data.name)
            if net.image_size != self._image_size:
                raise UserError(f"{self.where} has image_size {net.image_size}, the latents {self._image_size}")
        if self._channels not in (1, net.channels):
            raise UserError(f"{self.where} sees {net.channels} channels, the images have {self._channels}")

    def forward(
        self, states: dict[str, Float[Tensor, "b n d"]], batch: Batch, times: Float[Tensor, " b"] | None
    ) -> Float[Tensor, ""]:
        (state,) = states.values()
        tokens = state[:, self.num_prefix_tokens :]
        target = self.target(batch.images, tokens.shape[1])
        similar = cosine_similarity(self.projector(tokens).float(), target, dim=-1)
        return -similar.mean()

    @torch.no_grad()
    def target(self, images: Float[Tensor, "b c h w"], patches: int) -> Float[Tensor, "b n k"]:
        """Return the encoder's patch tokens of clean images in float32, on a grid of this number of patches."""
        net = self.teacher.net.to(images.device)
        pictures = fit_pictures(images, net, self.where)
        for state in net.forward_intermediates(pictures):
            tokens = state
        norm = final_norm(net)
        if norm is not None:
            tokens = norm(tokens)
        tokens = resize_grid(tokens[:, net.num_prefix_tokens :].float(), patches)
        if self.kind == "conv":
            spread, mean = torch.std_mean(tokens, dim=1, keepdim=True)
            tokens = (tokens - self.zscore * mean) / (spread + EPS)
        return tokens


class ConvProjector(nn.Conv2d):
    """A 3x3 convolution over the square grid of patch tokens: (b, n, d) -> (b, n, k)."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__(dim, out, kernel_size=3, padding=1)

    def forward(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b n k"]:
        side = math.isqrt(tokens.shape[1])
        grid = tokens.mT.unflatten(2, (side, side))
        return super().forward(grid).flatten(2).mT


def resize_grid(tokens: Float[Tensor, "b n d"], patches: int) -> Float[Tensor, "b m d"]:
    """Return tokens of a square grid interpolated to a square grid of `patches` tokens, if their numbers differ."""
    if tokens.shape[1] == patches:
        return tokens
    old, new = math.isqrt(tokens.shape[1]), math.isqrt(patches)
    grid = tokens.mT.unflatten(2, (old, old))
    grid = interpolate(grid, size=(new, new), mode="bilinear", antialias=True, align_corners=False)
    return grid.flatten(2).mT
