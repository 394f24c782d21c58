"""Unsupervised analysis of patch features: principal components as colours, and spectral clusters.

n = images, p = patches of an image, d = features. The clustering is a light version of the one behind the decay paper's
Figure 3, which also learns a segmentation of attention values. `examples/feature_figures.py` draws both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from scipy.sparse import csr_array, diags_array
from scipy.sparse.linalg import ArpackError, eigsh
from sklearn.cluster import KMeans
from torch import Tensor
from torch.nn.functional import normalize

from uvit_decay.runtime.errors import UserError, explain
from uvit_decay.runtime.random import generator

COLOURS = 3
PERCENTILES = (1.0, 99.0)  # values outside are saturated, so that a single outlier does not make all others grey
FLOOR = 0.1  # patches with a cosine similarity up to this are not neighbours
DENSE = 1500  # up to this number of patches all eigenvectors are computed: exact, and faster than Lanczos


@dataclass(frozen=True)
class Colours:
    """Colour map rgb = clamp((axes (x - mean) - low) / (high - low)), equal for all patches of all images.

    Args:
        mean: mean of the patches to which the map was fitted.
        axes: principal axes, the largest variance first; the entry of largest magnitude of each axis is positive.
        low: value of each projection that is mapped to 0.
        high: value of each projection that is mapped to 1.
        explained: share of the variance along each axis; 0 if there is no variance.
    """

    mean: Float64[Tensor, " d"]
    axes: Float64[Tensor, "3 d"]
    low: Float64[Tensor, " 3"]
    high: Float64[Tensor, " 3"]
    explained: Float64[Tensor, " 3"]

    @classmethod
    def of(cls, features: Float[Tensor, "n p d"]) -> Colours:
        """Fit a map to the first three principal components of patches, in float64.

        Raises:
            UserError: there are fewer than two patches or three features, or numbers that are not finite.
        """
        x = features.double().flatten(0, 1)
        count, d = x.shape
        if d < COLOURS or count < 2 or not x.isfinite().all():
            raise UserError(f"{count} patches of {d} features, perhaps with NaN, have no three principal components")
        mean = x.mean(dim=0)
        x = x - mean
        values, vectors = torch.linalg.eigh(x.T @ x / count)
        values = values.flip(0).clamp(min=0)
        axes = _fix_signs(vectors.T.flip(0)[:COLOURS])
        low, high = _find_range(x @ axes.T)
        total = values.sum().clamp(min=torch.finfo(values.dtype).tiny)
        return cls(mean, axes, low, high, values[:COLOURS] / total)

    def __call__(self, features: Float[Tensor, "*patches d"]) -> Float64[Tensor, "*patches 3"]:
        """Return RGB in [0, 1]; 1/2 for an axis without spread."""
        projections = (features.to(self.mean) - self.mean) @ self.axes.T
        return _scale_to_unit(projections, self.low, self.high)


class Spectrum(NamedTuple):
    """Result of spectral clustering: `eigenvectors` by decreasing eigenvalue, without the constant one, and `labels`.

    `labels` is the cluster of each patch.
    """

    eigenvectors: Float64[Tensor, "n p m"]
    labels: Int64[Tensor, "n p"]

    def rgb(self) -> Float64[Tensor, "n p 3"]:
        """Return the first three eigenvectors, each scaled over all patches to [0, 1]."""
        values = self.eigenvectors[..., :COLOURS]
        low, high = _find_range(values.flatten(0, 1))
        return _scale_to_unit(values, low, high)


def spectral_clusters(
    features: Float[Tensor, "n p d"],
    clusters: int,
    neighbours: int = 50,
    seed: int = 0,
) -> Spectrum:
    """Cluster the patches of all images together (Ng, Jordan and Weiss, 2001), on the CPU.

        S = D^(-1/2) W D^(-1/2),  S u_k = lambda_k u_k,  eigenvectors D^(-1/2) u_k,  clusters of the rows of u / |u|

    W contains the cosine similarities above FLOOR of the centred features of each patch and its nearest patches:
    `neighbours` in the same image and as many in the others. It is made symmetric; D are its row sums. The rows of u
    have one entry per cluster. The row of a patch without neighbours is 0.

    Args:
        features: patch features of all images.
        clusters: number of clusters of k-means, 2 or more.
        neighbours: largest number of neighbours in the same image, and in the others.
        seed: seed of k-means.

    Raises:
        UserError: there are too few patches for the clusters, or no two patches are similar.
    """
    shape = features.shape[:2]
    count = shape[0] * shape[1]
    vectors = max(clusters, COLOURS + 1)
    if count <= vectors:
        raise UserError(f"{clusters} spectral clusters need more than {vectors} patches, got {count}")
    weights = _build_affinity(features.detach().cpu(), neighbours)
    if not weights.nnz:
        raise UserError("these features have no spectral clusters: no two patches are similar, or there is NaN")
    degrees = weights.sum(axis=1)
    # D^(-1/2), with 0 for patches without neighbours.
    connected = degrees > 0
    root = np.sqrt(np.where(connected, degrees, 1))
    scale = diags_array(np.where(connected, 1 / root, 0))
    # The clusters need the first `clusters` eigenvectors, the colours three more after the constant one.
    u = _find_leading_eigenvectors(scale @ weights @ scale, vectors)
    rows = normalize(u[:, :clusters], dim=1)
    labels = KMeans(clusters, n_init=10, random_state=seed).fit_predict(rows.numpy())
    labels = torch.from_numpy(labels.astype(np.int64))
    # D^(-1/2) u. The first one, of eigenvalue 1, is constant and left out.
    eigenvectors = torch.from_numpy(scale.diagonal())[:, None] * u
    eigenvectors = _fix_signs(eigenvectors.T)[1:].T
    return Spectrum(eigenvectors.unflatten(0, shape), labels.unflatten(0, shape))


def _build_affinity(features: Float[Tensor, "n p d"], neighbours: int) -> csr_array:
    """Return W of `spectral_clusters`, sparse symmetric float64 (n p, n p), without a dense matrix of all pairs."""
    n, p, _ = features.shape
    x = features.double().flatten(0, 1)
    x = normalize(x - x.mean(dim=0), dim=1)
    rows = []
    columns = []
    values = []
    for first in range(0, n * p, p):
        image = slice(first, first + p)
        others = x[image] @ x.T  # similarity of this image's patches to all patches, (p, n p)
        inside = others[:, image].clone()
        # -1 is below FLOOR: no patch is its own neighbour, and this image is left out of the others.
        inside.fill_diagonal_(-1)
        others[:, image] = -1
        for similar, offset in ((inside, first), (others, 0)):
            near = similar.topk(min(neighbours, similar.shape[1]), dim=1)
            row, place = (near.values > FLOOR).nonzero(as_tuple=True)
            rows.append(first + row)
            columns.append(offset + near.indices[row, place])
            values.append(near.values[row, place])
    places = (torch.cat(rows).numpy(), torch.cat(columns).numpy())
    # j may be a neighbour of i without the converse; half of each direction makes W symmetric.
    one_way = csr_array((torch.cat(values).numpy(), places), shape=(n * p, n * p))
    return csr_array((one_way + one_way.T) / 2)


def _find_leading_eigenvectors(matrix: csr_array, count: int) -> Float64[Tensor, "n_p count"]:
    """Return the eigenvectors of the `count` largest eigenvalues, the largest first."""
    size = matrix.shape[0]
    if size <= DENSE:
        ascending = torch.linalg.eigh(torch.from_numpy(matrix.toarray())).eigenvectors
        return ascending.flip(1)[:, :count]
    # ARPACK's default start vector is random; this one makes the result reproducible.
    start = torch.rand(size, generator=generator("spectral"), dtype=torch.float64)
    with explain(f"the eigenvectors of {size} patches were not found", ArpackError):
        values, vectors = eigsh(matrix, k=count, which="LA", v0=start.numpy())
    descending = vectors[:, np.argsort(-values)]
    return torch.from_numpy(np.ascontiguousarray(descending))


def _fix_signs(vectors: Float64[Tensor, "k d"]) -> Float64[Tensor, "k d"]:
    """Return eigenvectors, whose sign is arbitrary, with a positive entry of largest magnitude in each row."""
    largest = vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)


def _find_range(values: Float64[Tensor, "m k"]) -> tuple[Tensor, Tensor]:
    """Return the two PERCENTILES of each column, (k,); torch.quantile would take at most 16 million values."""
    low, high = np.percentile(values.cpu().numpy(), PERCENTILES, axis=0)
    return torch.from_numpy(low).to(values), torch.from_numpy(high).to(values)


def _scale_to_unit(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Map `low` to 0 and `high` to 1, clamped; map values to 1/2 where low and high are equal."""
    width = high - low
    scaled = (values - low) / torch.where(width > 0, width, 1.0)
    return torch.where(width > 0, scaled.clamp(0, 1), 0.5)
