"""Features of a reference network, such as DINOv2, of the images that another network is probed on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.nn.functional import normalize

from uvit_decay.encoders.networks import ProbedNetwork, final_norm, fit_pictures
from uvit_decay.latents.autoencoder import Autoencoder
from uvit_decay.pictures import to_float
from uvit_decay.representations.features import TokenReader
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.precision import Precision, without_autocast
from uvit_decay.runtime.random import subset
from uvit_decay.terminal.errors import UserError, require_shape
from uvit_decay.terminal.typed import check_types

if TYPE_CHECKING:  # data are Lightning's
    from uvit_decay.data import ImageData


@dataclass(frozen=True)
class ReferenceFeatures:
    """Features of a reference network.

    Args:
        features: float32 on the CPU.
        rows: numbers of the images among the probed test images.
        about: description of the network and its features for reports, as plain values.
    """

    features: Float[Tensor, "m d"]
    rows: list[int]
    about: Mapping[str, Any]


@dataclass(frozen=True)
class ReferenceNetwork:
    """A reference network. Its features are the mean of the last layer's patch tokens, after the final norm if any.

    Args:
        network: the network, an encoder of pixels.
        device: device that computes.
        precision: precision of the network.
        batch_size: images at a time on each device.
        autoencoder: autoencoder that decodes the images of a probed network of latents; None for pixels.
    """

    network: ProbedNetwork
    device: torch.device
    precision: Precision
    batch_size: int
    autoencoder: Autoencoder | None = None

    def __post_init__(self) -> None:
        if not self.network.is_encoder or self.network.latents is not None:
            raise UserError(f"{self.network.title} is not an encoder of clean pictures", argument="reference")

    def features(self, data: ImageData, chosen: list[int], limit: int, processes: Processes) -> ReferenceFeatures:
        """Extract features of test images on all processes.

        Args:
            data: data of the probed network.
            chosen: indices of the probed test images.
            limit: largest number of images; a fixed random choice if there are more.
            processes: processes that share the work.
        """
        rows = subset(chosen, limit, "alignment")
        images = [chosen[row] for row in rows]
        net = self.network.net.to(self.device)
        last = len(net.layers) - 1

        def to_input(stored: Tensor) -> Tensor:
            x = data.network_input(stored)  # of the probed network
            pictures = x if self.autoencoder is None else to_float(self.autoencoder.decode(x))
            return fit_pictures(pictures, net, f"`reference` {self.network.title}")

        reader = TokenReader(net, None, to_input, self.device, self.precision, self.batch_size)
        pooled = reader.read_pooled(
            data.test,
            images,
            layers=[last],
            level=0.0,
            key=(),
            pools=["mean"],
            processes=processes,
            norm=final_norm(net),
        )
        features = processes.broadcast(pooled[0, 0] if processes.is_main else None)
        return ReferenceFeatures(features, rows, self._describe(len(rows)))

    def _describe(self, images: int) -> dict[str, Any]:
        """Return the description of the features of this number of images, for reports."""
        pictures = f"clean, {self.network.net.image_size} pixels, bicubic with antialias where resized"
        if self.autoencoder is not None:
            pictures += ", decoded from latents"
        return {
            **self.network.about,
            "features": "mean of the last layer's patch tokens, after the final norm if there is one",
            "pictures": pictures,
            "images": images,
            "neighbours": NEIGHBOURS,
        }


# Mutual nearest-neighbour kernel alignment of two networks' features of the same images:
#
#     CKNNA(K, L) = Align(K, L) / sqrt(Align(K, K) Align(L, L)),    Align(K, L) = HSIC(a K, a L),
#     a_ij = 1 if j is among the k nearest neighbours of i in both features, else 0; i is not its own neighbour,
#
# for the kernels K = A A' and L = B B' of features of unit length (Huh, Cheung, Wang, Isola 2024, "The Platonic
# Representation Hypothesis", App. A; REPA, Yu et al. 2025, reports it with k = 10 for 10,000 images). HSIC is the
# unbiased estimate of Song et al. (2012, "Feature Selection via Dependence Maximization", Eq. 5): with zero diagonals,
#
#     HSIC(K, L) = [tr(K L) + (1'K 1)(1'L 1) / ((n - 1)(n - 2)) - 2 (1'K L 1) / (n - 2)] / (n (n - 3)).
#
# Written from the publications and from memory of the authors' code (`cknna`, unbiased, which adds 1e-6 to the
# denominator). It was not compared with their code or numbers. No matrix of size n x n is allocated.
NEIGHBOURS = 10  # k of REPA and of the paper that defines CKNNA
SIMILARITIES = 2**24  # entries of K in memory at once: 64 MiB
ADDED = 1e-6  # to the denominator


@dataclass(frozen=True)
class Neighbourhood:
    """The k nearest other images of each of n images, and their cosine similarities, in float64."""

    index: Int64[Tensor, "n k"]
    similar: Float64[Tensor, "n k"]

    @classmethod
    def of(cls, features: Float[Tensor, "n d"], k: int = NEIGHBOURS) -> Neighbourhood:
        """Return the neighbours of features of more than k + 1 images, on their device."""
        x = normalize(features.float(), dim=1)
        indices = []
        values = []
        chunk = max(1, SIMILARITIES // len(x))
        with without_autocast(x):
            for rows in torch.arange(len(x), device=x.device).split(chunk):
                similar = x[rows] @ x.T
                similar.scatter_(1, rows[:, None], -torch.inf)
                nearest = similar.topk(k, dim=1)
                indices.append(nearest.indices)
                values.append(nearest.values)
        return cls(torch.cat(indices), torch.cat(values).double())

    def alignment(self, other: Neighbourhood) -> Float64[Tensor, ""]:
        """Return Align(K, L) of this neighbourhood, K, and the other one, L."""
        # The entries of a K and of a L at the places `self.index`, (n, k), 0 where a is 0.
        n = len(self.index)
        same = self.index[:, :, None] == other.index[:, None]
        ours = self.similar * same.any(dim=2)
        theirs = (same * other.similar[:, None]).sum(dim=2)
        # tr(K L): an entry K_ij meets L_ji where i is among the neighbours of j.
        images = torch.arange(n, device=self.index.device)
        back = self.index[self.index] == images[:, None, None]
        met = (back * theirs[self.index]).sum(dim=2)
        trace = (ours * met).sum()
        columns = torch.zeros_like(ours[:, 0])
        columns.scatter_add_(0, self.index.flatten(), ours.flatten())
        middle = (columns * theirs.sum(dim=1)).sum()  # 1'K L 1
        sums = ours.sum() * theirs.sum()
        estimate = trace + sums / ((n - 1) * (n - 2)) - 2 * middle / (n - 2)
        return estimate / (n * (n - 3))


@check_types
def cknna(a: Neighbourhood, b: Neighbourhood) -> Float64[Tensor, ""]:
    """Return CKNNA of two features of the same images: about 1 for equal features, about 0 for independent ones.

    CKNNA is 0 if Align(K, K) Align(L, L) is not positive, which can happen if no neighbours are mutual.

    Args:
        a: neighbourhood of n images in the features of one network, see `Neighbourhood.of`.
        b: neighbourhood of the same images in the features of the other network, with the same k.
    """
    require_shape(a.index.shape, b=b.index)
    scale = a.alignment(a) * b.alignment(b)
    denominator = scale.clamp(min=0).sqrt() + ADDED
    return torch.where(scale > 0, a.alignment(b) / denominator, 0.0)
