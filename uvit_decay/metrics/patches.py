"""What patch features show without labels: principal components as colours, spectral clusters, their mIoU with masks.

n = pictures, p = patches of a picture, d = features, q = pixels. Light versions of what papers show: the clusters are
those of a nearest-neighbour graph, with nothing learned on top, so their mIoU compares with no published number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array, diags_array
from scipy.sparse.linalg import ArpackError, eigsh
from sklearn.cluster import KMeans
from torch import Tensor
from torch.nn.functional import normalize

from uvit_decay.errors import UserError, one_line
from uvit_decay.randomness import generator

COLOURS = 3
PERCENTILES = (1.0, 99.0)  # what is beyond them is saturated: one odd patch must not make all others grey
SAMPLED = 64  # patches of each picture that the percentiles are of
FLOOR = 0.1  # cosine similarity up to which patches are no neighbours
DENSE = 1500  # patches up to which all eigenvectors are computed: exact, and faster than Lanczos there
IGNORED = 255  # in masks

Matching = Literal["hungarian", "greedy"]


@dataclass(frozen=True)
class Colours:
    """rgb = clamp((axes (x - mean) - low) / (high - low)), the same map for every patch of every picture.

    Args:
        mean: of the patches that it was fitted to.
        axes: principal ones, the largest variance first; of each, the entry of largest magnitude is positive.
        low: of the projections, what becomes 0.
        high: what becomes 1.
        explained: share of the variance that each axis holds; 0 where there is none.
    """

    mean: Float64[Tensor, " d"]
    axes: Float64[Tensor, "3 d"]
    low: Float64[Tensor, " 3"]
    high: Float64[Tensor, " 3"]
    explained: Float64[Tensor, " 3"]

    def __call__(self, features: Float[Tensor, "*patches d"]) -> Float64[Tensor, "*patches 3"]:
        """RGB in [0, 1]; 1/2 where an axis has no spread."""
        projected = (features.to(self.mean) - self.mean) @ self.axes.T
        return _between(projected, self.low, self.high)


class PatchPCA:
    """Principal axes of all patches of many pictures, which come in batches, in float64; then their colours.

    Holds one (d, d) matrix and, of each picture, at most SAMPLED random patches.
    """

    def __init__(self) -> None:
        self.count, self.kept = 0, []
        self.shift = self.total = self.outer = torch.zeros(())

    def update(self, features: Float[Tensor, "n p d"]) -> None:
        """Look at the next pictures; any float type, any device that has float64.

        Raises:
            UserError: fewer than three features, or NaN or infinity among them.
        """
        x = features.detach().double()
        if x.shape[-1] < COLOURS or not x.isfinite().all():
            what = f"only {x.shape[-1]} numbers" if x.shape[-1] < COLOURS else "NaN or infinity"
            raise UserError(f"patch features with {what} have no three principal components")
        if not self.count:
            self.shift = x.mean(dim=(0, 1))  # sums about it lose no digits to a large mean
        for picture in x:  # a stream for each: the batches change nothing
            order = torch.randperm(len(picture), generator=generator("patches", len(self.kept)))
            self.kept.append(picture[order[:SAMPLED]])
        centred = x.flatten(0, 1) - self.shift
        self.count += len(centred)
        self.total = self.total + centred.sum(dim=0)
        self.outer = self.outer + centred.T @ centred

    def colours(self) -> Colours:
        """Of everything that came so far.

        Raises:
            UserError: fewer than two patches.
        """
        if self.count < 2:
            raise UserError(f"principal components need two patches or more, got {self.count}")
        offset = self.total / self.count
        values, vectors = torch.linalg.eigh(self.outer / self.count - torch.outer(offset, offset))
        values, axes = values.flip(0)[:COLOURS].clamp(min=0), _signed(vectors.T.flip(0)[:COLOURS])
        mean, variance = self.shift + offset, (self.outer.trace() / self.count - offset.square().sum()).clamp(min=0)
        low, high = _range((torch.cat(self.kept) - mean) @ axes.T)
        return Colours(mean, axes, low, high, values / variance if variance > 0 else torch.zeros_like(values))


class Spectrum(NamedTuple):
    """`eigenvectors` by falling eigenvalue, the constant one left out, and the cluster of each patch."""

    eigenvectors: Float64[Tensor, "n p m"]
    labels: Int64[Tensor, "n p"]

    def rgb(self) -> Float64[Tensor, "n p 3"]:
        """The first three eigenvectors, each stretched over all patches to [0, 1]."""
        values = self.eigenvectors[..., :COLOURS]
        return _between(values, *_range(values.flatten(0, 1)))


def spectral_clusters(features: Float[Tensor, "n p d"], clusters: int, neighbours: int = 50, seed: int = 0) -> Spectrum:
    """Clusters of the patches of all pictures together (Ng, Jordan and Weiss, 2001), on the CPU.

        S = D^(-1/2) W D^(-1/2),  S u_k = lambda_k u_k,  eigenvectors D^(-1/2) u_k,  clusters of the rows of u / |u|

    W holds the cosine similarities, where above FLOOR, of the centred features of each patch and its nearest ones: so
    many in its own picture and as many in the others. It is made symmetric, D is its row sums. The rows have as many
    numbers as there are clusters. A patch without neighbours lies at the origin.

    Args:
        clusters: of k-means, 2 or more.
        neighbours: in the own picture, and in the others, at most.
        seed: of k-means.

    Raises:
        UserError: fewer than two clusters or one neighbour, not more patches than clusters and colours, NaN or
            infinity among the features, or no two that are alike.
    """
    count, wanted = features.shape[0] * features.shape[1], max(clusters, COLOURS + 1)
    if clusters < 2 or neighbours < 1:
        raise UserError(f"spectral clustering takes 2 clusters and 1 neighbour or more, got {clusters}, {neighbours}")
    if count <= wanted:
        raise UserError(f"{clusters} spectral clusters need more than {wanted} patches, got {count}")
    if not features.isfinite().all():
        raise UserError("patch features with NaN or infinity have no spectral clusters")
    weights = _affinity(features.detach().cpu(), neighbours)
    if not weights.nnz:
        raise UserError("no patch is like another one: these features have no spectral clusters")
    degrees = weights.sum(axis=1)
    scale = diags_array(np.where(degrees > 0, 1 / np.sqrt(np.where(degrees > 0, degrees, 1)), 0))
    u = _leading(scale @ weights @ scale, wanted)
    rows = normalize(u[:, :clusters], dim=1)
    labels = KMeans(clusters, n_init=10, random_state=seed).fit_predict(rows.numpy())
    smooth = _signed((torch.from_numpy(scale.diagonal())[:, None] * u).T)[1:].T
    shape = features.shape[:2]
    return Spectrum(smooth.unflatten(0, shape), torch.from_numpy(labels.astype(np.int64)).unflatten(0, shape))


class Segmentation(NamedTuple):
    """mIoU in [0, 1]: the mean of `iou` over `classes`, those that the masks have.

    `matched` is the class that each cluster stands for, -1 for none.
    """

    miou: float
    iou: Float64[Tensor, " c"]
    classes: Int64[Tensor, " c"]
    matched: Int64[Tensor, " k"]


def segmentation_miou(
    predicted: Int64[Tensor, "*q"], masks: Int64[Tensor, "*q"], matching: Matching = "hungarian"
) -> Segmentation:
    """IoU_c = |P_c and M_c| / |P_c or M_c| over the pixels of all pictures, but for those that a mask calls 255.

    M_c are the pixels of class c, P_c those of the clusters that stand for it.

    Args:
        predicted: numbers of clusters, from 0.
        masks: numbers of classes, 0 to 254.
        matching: `hungarian` pairs each cluster with one class at most, so that most pixels agree; pixels of a cluster
            that is left over count as missed, and a class that is left over has 0. `greedy` lets every cluster stand
            for the class that it has most pixels of, several for one if it so happens: never less agreement.

    Raises:
        UserError: masks in which everything is 255.
    """
    valid = masks != IGNORED
    if not valid.any():
        raise UserError("the masks have no pixel that is not 255")
    classes, truth = masks[valid].unique(return_inverse=True)
    clusters = int(predicted.max()) + 1
    pairs = (predicted[valid] * len(classes) + truth).bincount(minlength=clusters * len(classes))
    agree = pairs.reshape(clusters, len(classes)).double()
    chosen = torch.full((clusters,), -1, dtype=torch.int64)
    if matching == "greedy":
        seen = agree.sum(dim=1) > 0
        chosen[seen] = agree.argmax(dim=1)[seen]
    else:
        rows, columns = map(torch.from_numpy, linear_sum_assignment(agree.numpy(), maximize=True))
        chosen[rows] = columns
    stands = (chosen[:, None] == torch.arange(len(classes))).double()
    both = (stands * agree).sum(dim=0)
    iou = both / (agree.sum(dim=0) + stands.T @ agree.sum(dim=1) - both)
    return Segmentation(float(iou.mean()), iou, classes, torch.where(chosen < 0, -1, classes[chosen]))


def _affinity(features: Float[Tensor, "n p d"], neighbours: int) -> csr_array:
    """Symmetric float64 (n p, n p), a picture's rows at a time: no dense matrix of all pairs ever exists."""
    n, p, _ = features.shape
    x = features.double().flatten(0, 1)
    x = normalize(x - x.mean(dim=0), dim=1)
    rows, columns, values = [], [], []
    for i in range(n):
        own = slice(i * p, (i + 1) * p)
        similar = x[own] @ x.T
        inside = similar[:, own].clone().fill_diagonal_(-1)
        similar[:, own] = -1
        for block, first in ((inside, own.start), (similar, 0)):
            near = block.topk(min(neighbours, block.shape[1]), dim=1)
            row, place = (near.values > FLOOR).nonzero(as_tuple=True)
            rows.append(own.start + row)
            columns.append(first + near.indices[row, place])
            values.append(near.values[row, place])
    entries = (torch.cat(values).numpy(), (torch.cat(rows).numpy(), torch.cat(columns).numpy()))
    one_way = csr_array(entries, shape=(n * p, n * p))
    return csr_array((one_way + one_way.T) / 2)


def _leading(matrix: csr_array, count: int) -> Float64[Tensor, "n_p count"]:
    """Eigenvectors of the largest eigenvalues, these first."""
    if matrix.shape[0] <= DENSE:
        return torch.linalg.eigh(torch.from_numpy(matrix.toarray())).eigenvectors.flip(1)[:, :count]
    start = torch.rand(matrix.shape[0], generator=generator("spectral"), dtype=torch.float64)
    try:
        values, vectors = eigsh(matrix, k=count, which="LA", v0=start.numpy())
    except ArpackError as error:
        raise UserError(f"the eigenvectors of {matrix.shape[0]} patches were not found: {one_line(error)}") from error
    return torch.from_numpy(np.ascontiguousarray(vectors[:, np.argsort(-values)]))


def _signed(vectors: Float64[Tensor, "k d"]) -> Float64[Tensor, "k d"]:
    """The same directions, each with a positive entry of largest magnitude: eigenvectors have no sign of their own."""
    largest = vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)


def _range(values: Float64[Tensor, "m k"]) -> tuple[Tensor, Tensor]:
    """PERCENTILES of each column. NumPy's: torch.quantile takes 16 million numbers at most."""
    low, high = np.percentile(values.cpu().numpy(), PERCENTILES, axis=0)
    return torch.from_numpy(low).to(values), torch.from_numpy(high).to(values)


def _between(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """0 at `low`, 1 at `high`, clamped; 1/2 where they are equal."""
    width = high - low
    return torch.where(width > 0, ((values - low) / torch.where(width > 0, width, 1.0)).clamp(0, 1), 0.5)
