"""Noise share: the part of a layer's variance that comes from the noise of its images (Liang et al. 2026).

N images are seen under K noise draws each. With the state h_ik of image i under draw k, a vector of D coordinates,

    mu_i = mean_k h_ik,    mu = mean_i mu_i,
    W = sum_ik |h_ik - mu_i|^2 / (N (K - 1) D)                        variance within an image, over its draws,
    B = max(sum_i |mu_i - mu|^2 / (N D) - (1 - 1/N) W / K, 0)         variance between images,
    F = W / (W + B)                                                   noise share.

"Residual-stream burden", arXiv 2609.33895. The subtracted term of B is the noise that is left in the means of K draws.
The paper divides W by N K D. The expected value of that W is too small by the factor 1 - 1/K, and B keeps a part of the
noise. With K - 1, W and B are unbiased for any K of at least 2, apart from the maximum, which acts where B is close to
0. For the paper's K of 128 the two W differ by 0.8 %.

F does not depend on the scale of the states. It is not a signal-to-noise ratio of what an image means: B counts all
differences between images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from uvit_decay.representations.features import TokenReader
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.typed import check_types

if TYPE_CHECKING:  # data are Lightning's
    from uvit_decay.data.batches import ImageSet


class NoiseShare(NamedTuple):
    """Noise share of one layer; each value is a float64 scalar.

    Args:
        share: F = W / (W + B), in [0, 1]; 0 if all states are the same, NaN if one is not finite.
        within: W, variance per coordinate within an image.
        between: B, variance per coordinate between images.
    """

    share: Float64[Tensor, ""]
    within: Float64[Tensor, ""]
    between: Float64[Tensor, ""]


class NoiseSums:
    """Running sums of the noise share of one layer, in float64 on the device of the states; no state is kept."""

    def __init__(self) -> None:
        self.images = 0
        self.draws = 0
        self.mean: Tensor | float = 0.0  # mu over the images so far, (D,)
        self.between: Tensor | float = 0.0  # sum_i |mu_i - mu|^2
        self.within: Tensor | float = 0.0  # sum_ik |h_ik - mu_i|^2

    @torch.no_grad()
    def add(self, states: Float[Tensor, "n k ..."]) -> None:
        """Add the states of n further images, each under the same number k of draws, which is at least 2."""
        if states.device.type == "mps":  # Apple's GPUs lack float64
            states = states.cpu()
        n, self.draws = states.shape[:2]
        states = states.double().flatten(2)
        means = states.mean(dim=1)
        self.within = self.within + (states - means[:, None]).square_().sum()
        # The update of Chan, Golub and LeVeque (1983) joins two sets of images; a large mean does not cancel.
        mean = means.mean(dim=0)
        change = mean - self.mean
        total = self.images + n
        joined = self.images * n / total
        self.between = self.between + (means - mean).square().sum() + joined * change.square().sum()
        self.mean = self.mean + change * (n / total)
        self.images = total

    def result(self) -> NoiseShare:
        """Return the noise share of all states so far, on their device."""
        size = self.images * self.mean.numel()
        within = self.within / (size * (self.draws - 1))
        left = (1 - 1 / self.images) * within / self.draws  # noise in the means of the draws
        between = (self.between / size - left).clamp(min=0)
        total = within + between
        share = torch.where(total == 0, 0.0, within / total)  # NaN if a state is not finite
        return NoiseShare(share, within, between)


@check_types
def noise_share(states: Float[Tensor, "n k ..."]) -> NoiseShare:
    """Return the noise share F of a layer, and the variances W and B, in float64.

    F = W / (W + B) after Liang et al. 2026, "Residual-stream burden" (arXiv 2609.33895), with an unbiased W; the
    equations are at the top of this module.

    Args:
        states: states of n >= 1 images under k >= 2 noise draws each, of any floating dtype and any further shape; D is
            the number of all further coordinates. With one image, B is 0.

    Raises:
        UserError: there is no image, or there are fewer than two draws.
    """
    n, k = states.shape[:2]
    if n < 1 or k < 2:
        raise UserError(f"a noise share needs an image and two noise draws or more, got {n} and {k}")
    sums = NoiseSums()
    sums.add(states)
    return sums.result()


def measure_noise_share(
    reader: TokenReader,
    images: ImageSet,
    chosen: Sequence[int],
    layers: Sequence[int],
    level: float,
    seed: int,
    draws: int,
) -> Float64[Tensor, "3 layers"]:
    """Return F, W and B of layers of a denoiser at one noise level, on the CPU.

    D = tokens x channels: the state is the whole token state that the layer passes on, prefix tokens (time, class)
    included. The noise of an image is a function of the seed, the image's index and the number of the draw alone. It is
    the same for all networks, layers and noise levels, so that differences between runs are paired.

    Args:
        reader: reader of the network's token states; its batches hold at least `draws` states.
        images: images.
        chosen: indices of the N images.
        layers: numbers of layers, ascending.
        level: noise level t.
        seed: seed of the noise.
        draws: K, the noise draws of each image, at least 2.
    """
    sums = [NoiseSums() for _ in layers]
    keys = [(seed, "noise share", draw) for draw in range(draws)]

    def add(position: int, states: Tensor) -> None:
        sums[position].add(states)

    reader.visit(images.stored, chosen, layers, level, keys, add)
    results = [torch.stack(layer.result()) for layer in sums]
    return torch.stack(results, dim=1).cpu()
