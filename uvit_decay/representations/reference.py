"""Features of a reference network, such as DINOv2, of the images that another network is probed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.nn.functional import normalize

from uvit_decay.autoencoder import Autoencoder, decoder
from uvit_decay.image_io import to_float
from uvit_decay.nn.embed import without_autocast
from uvit_decay.representations.features import TokenReader, final_norm
from uvit_decay.representations.networks import ProbedNetwork, fit_pictures, open_network
from uvit_decay.representations.options import Alignment, Probing
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.precision import Precision
from uvit_decay.runtime.random import subset
from uvit_decay.sampling_options import LoadingOptions

if TYPE_CHECKING:  # data are Lightning's
    from uvit_decay.data import ImageData


@dataclass(frozen=True)
class Reference:
    """Features, float32 on the CPU, of the test images with the numbers `rows` among those that are probed.

    `about` says whose they are, and is part of reports.
    """

    features: Float[Tensor, "m d"]
    rows: list[int]
    about: Mapping[str, Any]


@dataclass(frozen=True)
class ReferenceNetwork:
    """A reference: its features are the mean of the last layer's patch tokens, after its final norm if it has one.

    Args:
        judged: the network, an encoder.
        device: where it computes.
        precision: of the network.
        batch_size: images at a time on each device.
        autoencoder: what decodes the images of a network of latents; None for pixels.

    Raises:
        UserError: a denoiser.
    """

    judged: ProbedNetwork
    device: torch.device
    precision: Precision
    batch_size: int
    autoencoder: Autoencoder | None = None

    def __post_init__(self) -> None:
        if not self.judged.is_encoder or self.judged.latents is not None:
            raise UserError(f"--reference {self.judged.title}: only encoders of clean pictures are references")

    def features(self, data: ImageData, chosen: list[int], limit: int, processes: Processes) -> Reference:
        """Extract features of at most `limit` of the `chosen` test images, a fixed random choice, on all processes."""
        rows, net = subset(chosen, limit, "alignment"), self.judged.net.to(self.device)

        reader = TokenReader(
            net, None, lambda x: self._enter(data.network_input(x)), self.device, self.precision, self.batch_size
        )
        where = data.test, [chosen[row] for row in rows], [len(net.layers) - 1], 0.0
        found = reader.pooled(*where, pools=["mean"], norm=final_norm(net), processes=processes)[0, 0]
        decoded = "" if self.autoencoder is None else ", decoded from latents"
        about = {
            **self.judged.about,
            "features": "mean of the last layer's patch tokens, after the final norm if there is one",
            "pictures": f"clean, {net.image_size} pixels, bicubic with antialias where resized{decoded}",
            "images": len(rows),
            "neighbours": NEIGHBOURS,
        }
        return Reference(processes.broadcast(found if processes.is_main else None), rows, about)

    def _enter(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        """Return pictures in [-1, 1] of the channels and the size that the reference takes, of inputs of a network."""
        pictures = x if self.autoencoder is None else to_float(self.autoencoder.decode(x))
        return fit_pictures(pictures, self.judged.net, f"--reference {self.judged.title}")


def open_reference(
    judged: ProbedNetwork,
    probing: Probing,
    alignment: Alignment,
    trust: Sequence[str],
    device: torch.device,
    precision: Precision,
) -> ReferenceNetwork:
    """Open the reference of a network that is judged by a protocol that aligns.

    Raises:
        UserError: a reference that cannot be one.
    """
    network = open_network(alignment.reference, LoadingOptions(trust=trust), alignment.reference_size)
    autoencoder = decoder(judged.latents, None, device)
    return ReferenceNetwork(network, device, precision, probing.batch_size, autoencoder)


# Mutual nearest-neighbour kernel alignment of two networks' features of the same images:
#
#     CKNNA(K, L) = Align(K, L) / sqrt(Align(K, K) Align(L, L)),    Align(K, L) = HSIC(a K, a L),
#     a_ij = 1 if j is among the k nearest neighbours of i in both features, else 0; i is no neighbour of itself,
#
# for the kernels K = A A' and L = B B' of features of unit length (Huh, Cheung, Wang, Isola 2024, "The Platonic
# Representation Hypothesis", App. A; REPA, Yu et al. 2025, reports it with k = 10 for 10,000 images). HSIC is the
# unbiased estimate of Song et al. (2012, "Feature Selection via Dependence Maximization", Eq. 5): with zero diagonals,
#
#     HSIC(K, L) = [tr(K L) + (1'K 1)(1'L 1) / ((n - 1)(n - 2)) - 2 (1'K L 1) / (n - 2)] / (n (n - 3)).
#
# Written from the publications and from memory of the authors' code (`cknna`, unbiased, which adds 1e-6 to the
# denominator): neither their code nor their numbers were at hand to compare with. Nothing of size n x n is held.
NEIGHBOURS = 10  # k of REPA and of the paper that defines CKNNA
SIMILARITIES = 2**24  # entries of K that are held at once: 64 MiB
ADDED = 1e-6  # to the denominator


@dataclass(frozen=True)
class Neighbourhood:
    """The k nearest other images of each of n images, and their cosine similarities, in float64."""

    index: Int64[Tensor, "n k"]
    similar: Float64[Tensor, "n k"]

    @classmethod
    def of(cls, features: Float[Tensor, "n d"], k: int = NEIGHBOURS) -> Neighbourhood:
        """Find the neighbours of features, of more than k + 1 images, on their device."""
        x, found = normalize(features.float(), dim=1), []
        with without_autocast(x):
            for rows in torch.arange(len(x), device=x.device).split(max(1, SIMILARITIES // len(x))):
                similar = (x[rows] @ x.T).scatter_(1, rows[:, None], -torch.inf)
                found.append(similar.topk(k, dim=1))
        return cls(torch.cat([part.indices for part in found]), torch.cat([part.values for part in found]).double())

    def alignment(self, other: Neighbourhood) -> Float64[Tensor, ""]:
        """Return Align(K, L) of this one, K, and of the other, L."""
        # The entries of a K and of a L at the places `index` of this one, (n, k), 0 where a is 0.
        n, same = len(self.index), self.index[:, :, None] == other.index[:, None]
        ours, theirs = self.similar * same.any(dim=2), (same * other.similar[:, None]).sum(dim=2)
        # tr(K L): an entry K_ij meets L_ji where i is among the neighbours of j.
        back = self.index[self.index] == torch.arange(n, device=self.index.device)[:, None, None]
        trace = (ours * (back * theirs[self.index]).sum(dim=2)).sum()
        columns = torch.zeros_like(ours[:, 0]).scatter_add_(0, self.index.flatten(), ours.flatten())
        middle = (columns * theirs.sum(dim=1)).sum()  # 1'K L 1
        sums = ours.sum() * theirs.sum()
        return (trace + sums / ((n - 1) * (n - 2)) - 2 * middle / (n - 2)) / (n * (n - 3))


def cknna(a: Neighbourhood, b: Neighbourhood) -> Float64[Tensor, ""]:
    """Return CKNNA of two features of the same images: about 1 for equal ones, about 0 for independent ones.

    It is 0 where Align(K, K) Align(L, L) is not positive, as it may be if no neighbours are mutual.
    """
    scale = a.alignment(a) * b.alignment(b)
    return torch.where(scale > 0, a.alignment(b) / (scale.clamp(min=0).sqrt() + ADDED), 0.0)
