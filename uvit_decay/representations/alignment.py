"""Mutual nearest-neighbour kernel alignment of two networks' features of the same images.

    CKNNA(K, L) = Align(K, L) / sqrt(Align(K, K) Align(L, L)),    Align(K, L) = HSIC(a K, a L),
    a_ij = 1 if j is among the k nearest neighbours of i in both features, else 0; i is no neighbour of itself,

for the kernels K = A A' and L = B B' of features of unit length (Huh, Cheung, Wang, Isola 2024, "The Platonic
Representation Hypothesis", App. A; REPA, Yu et al. 2025, reports it with k = 10 for 10,000 images). HSIC is the
unbiased estimate of Song et al. (2012, "Feature Selection via Dependence Maximization", Eq. 5): with zero diagonals,

    HSIC(K, L) = [tr(K L) + (1'K 1)(1'L 1) / ((n - 1)(n - 2)) - 2 (1'K L 1) / (n - 2)] / (n (n - 3)).

Written from the publications and from memory of the authors' code (`cknna`, unbiased, which adds 1e-6 to the
denominator, so does this): neither their code nor their numbers were at hand to compare with. Rows of a K have at most
k entries, so that apart from the search for neighbours, in chunks of rows, nothing of size n x n is held.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.nn.functional import normalize

from uvit_decay.nn.embed import without_autocast
from uvit_decay.runtime.errors import UserError

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
        """Find the neighbours of features, on their device; raise a UserError unless there are more than k + 1."""
        count = len(features)
        if count < k + 2:
            raise UserError(f"alignment by {k} nearest neighbours needs {k + 2} images or more, got {count}")
        x = normalize(features.float(), dim=1)
        found = []
        with without_autocast(x):
            for rows in torch.arange(count, device=x.device).split(max(1, SIMILARITIES // count)):
                similar = (x[rows] @ x.T).scatter_(1, rows[:, None], -torch.inf)
                found.append(similar.topk(k, dim=1))
        return cls(torch.cat([part.indices for part in found]), torch.cat([part.values for part in found]).double())

    def shared(self, other: Neighbourhood) -> tuple[Float64[Tensor, "n k"], Float64[Tensor, "n k"]]:
        """Return the entries of a K and of a L at the places `index` of this one, 0 where a is 0."""
        same = self.index[:, :, None] == other.index[:, None]
        return self.similar * same.any(dim=2), (same * other.similar[:, None]).sum(dim=2)

    def alignment(self, other: Neighbourhood) -> Float64[Tensor, ""]:
        """Return Align(K, L)."""
        n, (ours, theirs) = len(self.index), self.shared(other)
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
