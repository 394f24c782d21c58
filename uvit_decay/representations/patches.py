"""Unsupervised analysis of patch features: principal components as colours, spectral clusters, their mIoU with masks.

n = images, p = patches of an image, d = features, q = pixels. These are light versions of published analyses: the
clusters are those of a nearest-neighbour graph without a learned head, so their mIoU is not comparable to published
numbers.
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

from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.random import generator

COLOURS = 3
PERCENTILES = (1.0, 99.0)  # values beyond are saturated, so that a single outlier does not make all others grey
FLOOR = 0.1  # patches with a cosine similarity up to this are not neighbours
DENSE = 1500  # up to this number of patches all eigenvectors are computed: exact, and faster than Lanczos
IGNORED = 255  # label of masks that is left out


@dataclass(frozen=True)
class Colours:
    """Colour map rgb = clamp((axes (x - mean) - low) / (high - low)), equal for all patches of all images.

    Args:
        mean: mean of the patches to which the map was fitted.
        axes: principal axes, the largest variance first; the entry of largest magnitude of each is positive.
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
        """Return the map of the first principal components of patches, finite and two or more, in float64."""
        x = features.double().flatten(0, 1)
        if x.shape[1] < COLOURS or len(x) < 2 or not x.isfinite().all():
            raise UserError(f"patch features {tuple(x.shape)}, perhaps with NaN, have no three principal components")
        mean = x.mean(dim=0)
        x = x - mean
        values, vectors = torch.linalg.eigh(x.T @ x / len(x))
        values, axes = values.flip(0).clamp(min=0), _signed(vectors.T.flip(0)[:COLOURS])
        low, high = _range(x @ axes.T)
        return cls(mean, axes, low, high, values[:COLOURS] / values.sum().clamp(min=torch.finfo(values.dtype).tiny))

    def __call__(self, features: Float[Tensor, "*patches d"]) -> Float64[Tensor, "*patches 3"]:
        """Return RGB in [0, 1]; 1/2 for an axis without spread."""
        return _between((features.to(self.mean) - self.mean) @ self.axes.T, self.low, self.high)


class Spectrum(NamedTuple):
    """Result of spectral clustering: `eigenvectors` by decreasing eigenvalue, without the constant one, and `labels`.

    `labels` is the cluster of each patch.
    """

    eigenvectors: Float64[Tensor, "n p m"]
    labels: Int64[Tensor, "n p"]

    def rgb(self) -> Float64[Tensor, "n p 3"]:
        """Return the first three eigenvectors, each scaled over all patches to [0, 1]."""
        values = self.eigenvectors[..., :COLOURS]
        return _between(values, *_range(values.flatten(0, 1)))


def spectral_clusters(features: Float[Tensor, "n p d"], clusters: int, neighbours: int = 50, seed: int = 0) -> Spectrum:
    """Cluster the patches of all images together (Ng, Jordan and Weiss, 2001), on the CPU.

        S = D^(-1/2) W D^(-1/2),  S u_k = lambda_k u_k,  eigenvectors D^(-1/2) u_k,  clusters of the rows of u / |u|

    W contains the cosine similarities above FLOOR of the centred features of each patch and its nearest patches:
    `neighbours` in the same image and as many in the others. It is made symmetric; D are its row sums. The rows of u
    have one entry a cluster. The row of a patch without neighbours is 0.

    Args:
        features: patch features of all images.
        clusters: number of clusters of k-means, 2 or more.
        neighbours: maximum number of neighbours in the same image, and in the others.
        seed: seed of k-means.
    """
    count, vectors = features.shape[0] * features.shape[1], max(clusters, COLOURS + 1)
    if count <= vectors:
        raise UserError(f"{clusters} spectral clusters need more than {vectors} patches, got {count}")
    weights = _affinity(features.detach().cpu(), neighbours)
    if not weights.nnz:
        raise UserError("no patch is like another one, or there is NaN: these features have no spectral clusters")
    degrees = weights.sum(axis=1)
    # D^(-1/2), with 0 for patches without neighbours.
    scale = diags_array(np.where(degrees > 0, 1 / np.sqrt(np.where(degrees > 0, degrees, 1)), 0))
    # The clusters need the first `clusters` eigenvectors, the colours those after the constant one.
    u = _leading_eigenvectors(scale @ weights @ scale, vectors)
    rows = normalize(u[:, :clusters], dim=1)
    labels = KMeans(clusters, n_init=10, random_state=seed).fit_predict(rows.numpy())
    # D^(-1/2) u, of which the first, of eigenvalue 1, is constant and left out.
    smooth = _signed((torch.from_numpy(scale.diagonal())[:, None] * u).T)[1:].T
    shape = features.shape[:2]
    return Spectrum(smooth.unflatten(0, shape), torch.from_numpy(labels.astype(np.int64)).unflatten(0, shape))


class Segmentation(NamedTuple):
    """Agreement of clusters with masks: `miou` in [0, 1] is the mean of `iou` over `classes`, the classes in the masks.

    `matched` is the class assigned to each cluster, -1 for none.
    """

    miou: float
    iou: Float64[Tensor, " c"]
    classes: Int64[Tensor, " c"]
    matched: Int64[Tensor, " k"]


def segmentation_miou(
    predicted: Int64[Tensor, "*q"], masks: Int64[Tensor, "*q"], matching: Literal["hungarian", "greedy"] = "hungarian"
) -> Segmentation:
    """Return IoU_c = |P_c and M_c| / |P_c or M_c| over the pixels of all images, without those with mask 255.

    M_c are the pixels of class c, P_c those of the clusters assigned to it.

    Args:
        predicted: cluster of each pixel, from 0.
        masks: class of each pixel, 0 to 254, or 255.
        matching: `hungarian` assigns each cluster to one class at most, with the largest number of agreeing pixels;
            pixels of clusters without a class count as missed, and classes without a cluster have IoU 0. `greedy`
            assigns each cluster to its most frequent class, possibly several to one class, with at least that number.
    """
    valid = masks != IGNORED
    if not valid.any():
        raise UserError("the masks have no pixel that is not 255")
    classes, truth = masks[valid].unique(return_inverse=True)
    clusters = int(predicted.max()) + 1
    # Contingency table: `agree[k, c]` counts the pixels of cluster k and class c.
    pairs = (predicted[valid] * len(classes) + truth).bincount(minlength=clusters * len(classes))
    agree = pairs.reshape(clusters, len(classes)).double()
    chosen = torch.full((clusters,), -1, dtype=torch.int64)
    if matching == "greedy":
        present = agree.sum(dim=1) > 0
        chosen[present] = agree.argmax(dim=1)[present]
    else:
        rows, columns = map(torch.from_numpy, linear_sum_assignment(agree.numpy(), maximize=True))
        chosen[rows] = columns
    # assigned[k, c] is 1 if cluster k is assigned to class c; |P or M| = |M| + |P| - |P and M|.
    assigned = (chosen[:, None] == torch.arange(len(classes))).double()
    both = (assigned * agree).sum(dim=0)
    iou = both / (agree.sum(dim=0) + assigned.T @ agree.sum(dim=1) - both)
    return Segmentation(float(iou.mean()), iou, classes, torch.where(chosen < 0, -1, classes[chosen]))


def _affinity(features: Float[Tensor, "n p d"], neighbours: int) -> csr_array:
    """Return W of `spectral_clusters`, sparse symmetric float64 (n p, n p), without a dense matrix of all pairs."""
    n, p, _ = features.shape
    x = features.double().flatten(0, 1)
    x = normalize(x - x.mean(dim=0), dim=1)
    rows, columns, values = [], [], []
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
    entries = (torch.cat(values).numpy(), (torch.cat(rows).numpy(), torch.cat(columns).numpy()))
    # j may be a neighbour of i without the converse; half of each direction makes W symmetric.
    one_way = csr_array(entries, shape=(n * p, n * p))
    return csr_array((one_way + one_way.T) / 2)


def _leading_eigenvectors(matrix: csr_array, count: int) -> Float64[Tensor, "n_p count"]:
    """Return the eigenvectors of the `count` largest eigenvalues, the largest first."""
    if matrix.shape[0] <= DENSE:
        return torch.linalg.eigh(torch.from_numpy(matrix.toarray())).eigenvectors.flip(1)[:, :count]
    # ARPACK's default start vector is random; this one makes the result reproducible.
    start = torch.rand(matrix.shape[0], generator=generator("spectral"), dtype=torch.float64)
    with explained(f"the eigenvectors of {matrix.shape[0]} patches were not found", ArpackError):
        values, vectors = eigsh(matrix, k=count, which="LA", v0=start.numpy())
    return torch.from_numpy(np.ascontiguousarray(vectors[:, np.argsort(-values)]))


def _signed(vectors: Float64[Tensor, "k d"]) -> Float64[Tensor, "k d"]:
    """Return the rows with signs such that their entry of largest magnitude is positive; eigenvectors have no sign."""
    largest = vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)


def _range(values: Float64[Tensor, "m k"]) -> tuple[Tensor, Tensor]:
    """Return the PERCENTILES of each column, by NumPy since torch.quantile takes at most 16 million values."""
    low, high = np.percentile(values.cpu().numpy(), PERCENTILES, axis=0)
    return torch.from_numpy(low).to(values), torch.from_numpy(high).to(values)


def _between(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Map `low` to 0 and `high` to 1, clamped; to 1/2 where they are equal."""
    width = high - low
    return torch.where(width > 0, ((values - low) / torch.where(width > 0, width, 1.0)).clamp(0, 1), 0.5)
