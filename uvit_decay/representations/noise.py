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

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.files.validation import write_json
from uvit_decay.nn.intermediates import HasIntermediates, layer_indices
from uvit_decay.representations.features import TokenReader, compute_rows
from uvit_decay.representations.grid import LayerTable
from uvit_decay.representations.probe_options import Probing
from uvit_decay.representations.probing import check_same_images
from uvit_decay.runs.history import NOISE_REPORT, NOISE_TABLE
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.precision import Precision
from uvit_decay.runtime.random import subset
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import check_types

if TYPE_CHECKING:  # data are Lightning's
    from uvit_decay.data import ImageData


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
    """
    n, k = states.shape[:2]
    if n < 1 or k < 2:
        raise UserError(f"a noise share needs an image and two noise draws or more, got {n} and {k}")
    sums = NoiseSums()
    sums.add(states)
    return sums.result()


NOISE_SHARE, WITHIN, BETWEEN = "noise_share", "within_variance", "between_variance"  # NoiseShare's fields in tables
NOISE_SCORES = (NOISE_SHARE, WITHIN, BETWEEN)
NOISE_PICTURE = "noise_share.png"


class NoiseTable(LayerTable):
    """F, W and B of the layers of a denoiser, by the names NOISE_SCORES; see the arguments of `LayerTable`."""

    files = (NOISE_TABLE, NOISE_REPORT, NOISE_PICTURE)

    def number(self, weights: str) -> str:
        """Return everything to be stated with the noise shares, in one line."""
        about = f"{self.describe_network(weights)}, {self.describe_images()}, seed {self.protocol['seed']}"
        return f"noise share of token states, {about}"

    def text(self, weights: str) -> str:
        """Return the noise shares of the first, the last and the lowest layer at each noise level, for people."""
        names = [layer.name for layer in self.layers.values()]
        lines = [self.number(weights)]
        for t, shares in zip(self.times, self.scores[NOISE_SHARE], strict=True):
            lowest = int(shares.argmin())
            lines.append(
                f"t = {t:g}: {shares[0]:.3f} after {names[0]}, {shares[-1]:.3f} after {names[-1]}, lowest "
                f"{shares[lowest]:.3f} after {names[lowest]}"
            )
        return "\n".join(lines)

    def save(self, folder: Path, what: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Write noise_share.csv and noise_share.png.

        Args:
            folder: folder of the files.
            what: name of the network or step that was measured, for titles.
            metadata: description of the network with its `weights`; writes noise_share.json, too.
        """
        self.write(folder / NOISE_TABLE)
        if metadata is not None:
            protocol = {**self.protocol, **metadata}
            report = {"number": self.number(metadata["weights"]), "protocol": protocol, "cells": self.cells()}
            write_json(folder / NOISE_REPORT, report)
        self.draw(folder / NOISE_PICTURE, NOISE_SHARE, f"{what}: noise share in %, {self.protocol['noise']}")


def measure_noise_share(
    net: HasIntermediates,
    path: NoisePath,
    data: ImageData,
    probing: Probing,
    device: torch.device,
    precision: Precision,
    processes: Processes,
) -> NoiseTable | None:
    """Measure F, W and B of the layers of a denoiser at all noise levels; only the first process gets the table.

    D = tokens x channels: the state is the whole token state that the layer passes on, prefix tokens (time, class)
    included. The noise of an image is a function of the seed, the image's index and the number of the draw alone. It is
    the same for all networks, layers and noise levels, so that differences between runs are paired.

    Args:
        net: the network, in eval mode, on `device`.
        path: noise path of its input.
        data: data with test images.
        probing: options: `draws_of_noise`, `noise_images`, noise levels, layers, seed and batch size.
        device: device of the network.
        precision: precision of the network.
        processes: processes that share the noise levels.
    """
    times = probing.levels(encoder=False)
    layers = layer_indices(net.layers, probing.layers)
    chosen = subset(data.test, probing.noise_images, "noise share")
    draws = probing.draws_of_noise
    keys = [(probing.seed, "noise share", draw) for draw in range(draws)]
    reader = TokenReader(net, path, data.network_input, device, precision, probing.batch_size)

    def work(level: int) -> Float64[Tensor, "3 layers"]:
        sums = [NoiseSums() for _ in layers]

        def add(position: int, states: Tensor) -> None:
            sums[position].add(states)

        reader.visit(data.test.stored, chosen, layers, times[level], keys, add)
        results = [torch.stack(layer.result()) for layer in sums]
        return torch.stack(results, dim=1).cpu()

    about: dict[str, Any] = {
        "data": data.name,
        "times": list(times),
        "layers": probing.layers,
        "seed": probing.seed,
        "batch_size": probing.batch_size,
        "label": "null",
        "noise": f"{draws} draws of {len(chosen)} test images",
        "noise_share": {
            "images": len(chosen),
            "draws": draws,
            "coordinates": "tokens x channels, prefix tokens included",
        },
    }
    if precision != "float32":
        about["precision"] = precision
    if processes.size > 1:
        check_same_images(data, about, processes)
    size = 4 * len(layers) * probing.batch_size * net.dim
    rows = compute_rows("noise share", "level", work, range(len(times)), device, precision, processes, size)
    if not processes.is_main:
        return None
    scores = torch.stack(rows, dim=1)
    found = {number: net.layers[number] for number in layers}
    return NoiseTable(found, times, dict(zip(NOISE_SCORES, scores, strict=True)), about)
