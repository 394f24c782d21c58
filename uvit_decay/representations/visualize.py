"""Figures of features: principal components and spectral clusters of patches, t-SNE of pooled features.

The clusters come from a light spectral clustering (`patches.py`), not from the full method of the paper's figure, which
also learns a segmentation of attention values: their mIoU is not comparable with the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from sklearn.manifold import TSNE
from torch import Tensor

from uvit_decay.class_names import in_words
from uvit_decay.nn.intermediates import Layer
from uvit_decay.plots import distinct, image_table, scatter
from uvit_decay.representations.features import TokenReader
from uvit_decay.representations.options import Visualization
from uvit_decay.representations.patches import IGNORED, Colours, segmentation_miou, spectral_clusters
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.random import generator

if TYPE_CHECKING:
    from uvit_decay.data.masks import Masks
    from uvit_decay.evaluation.image_sources import ImageSource

ROWS = 16  # most images drawn; all are clustered
CLASSES = 10  # most classes in t-SNE; a fixed random choice if there are more
FEWEST = 5  # images that t-SNE needs
CLUSTERS = 6  # number of clusters without masks
UNMATCHED = 255  # grey level of clusters without a class, and of ignored pixels


@dataclass(frozen=True)
class PatchFeatures:
    """Patch features of images in a network; each image has one fixed noise.

    Args:
        reader: the network.
        images: images of the size that the network, or its autoencoder, takes.
        time: noise level t; 0 for an encoder.
        seed: seed of the noise.
        title: name of the network in titles.
    """

    reader: TokenReader
    images: ImageSource
    time: float
    seed: int
    title: str

    @property
    def level(self) -> str:
        """The noise level, and the precision unless it is float32, in words for titles."""
        text = "clean images" if self.reader.path is None else f"t = {self.time:g}"
        if self.reader.precision != "float32":
            text += f", {self.reader.precision}"
        return text

    def states(self, indices: Sequence[int], layers: Sequence[int]) -> Iterator[Float[Tensor, "layers b p d"]]:
        """Yield float32 patch states of the layers, on the CPU, for each batch of images in order.

        Args:
            indices: indices of the images.
            layers: numbers of layers, ascending; later ones never run.
        """
        first = self.reader.net.num_prefix_tokens

        def select_patches(state: Tensor) -> Tensor:
            return state[:, first:].float()

        key = (self.seed, "pictures")
        return self.reader.states(self.images.read, indices, layers, self.time, key, select_patches, Processes())


def _shuffle(count: int) -> list[int]:
    """Return image indices in a fixed random order: folders are sorted by class, so the first are of few classes."""
    return torch.randperm(count, generator=generator("subset", "features")).tolist()


# ---- patches


def draw_patches(
    options: Visualization,
    features: PatchFeatures,
    layers: Mapping[int, Layer],
    masks: Masks | None,
) -> None:
    """Draw principal components and clusters of patches, one row for each image; print a summary.

    Args:
        options: options of the figure.
        features: patch features of the images.
        layers: the layers to draw, by number, ascending.
        masks: masks of some images, of which only these are drawn; None draws any.

    Raises:
        UserError: the patches are not a square grid, or the features have no principal components or clusters.
    """
    images = features.images
    order = _shuffle(len(images))
    candidates = order
    if masks is not None:
        members = set(masks.members)
        candidates = [i for i in order if i in members]
    shown = candidates[: options.num]
    drawn = shown[:ROWS]
    truth = masks.read(shown, images.shape[1]) if masks else None
    states = torch.cat(list(features.states(shown, list(layers))), dim=1)
    tokens = states.shape[2]
    if math.isqrt(tokens) ** 2 != tokens or tokens < 4:
        raise UserError(f"{features.title} has {tokens} patch tokens, not a square grid: use --views tsne")
    names = [f"{i} {layer.name}" for i, layer in layers.items()]
    maps = []
    if "pca" in options.views:
        maps = _fit_colours(features, list(layers), names, order[: options.fit])
    pictures = images.read(drawn).cpu().expand(-1, 3, -1, -1)
    columns = {"image": pictures.permute(0, 2, 3, 1)}
    for k, name in enumerate(names):
        if maps:
            columns[f"PCA\n{name}"] = on_grid(_to_bytes(maps[k](states[k, :ROWS])))
        if "spectral" in options.views:
            columns |= _draw_clusters(options, states[k], name, truth)
    if truth is not None:
        columns["mask"] = _paint(truth[:ROWS], truth)
    about = f"{features.title}, {images.name}, {features.level}"
    image_table(options.out, columns, _name_rows(images, drawn), about)
    print(f"wrote {options.out}: {len(drawn)} images of {images.name}")


def _name_rows(images: ImageSource, indices: list[int]) -> list[str]:
    """Return the class names of images in words, or their indices if they have no classes."""
    if images.labels is None:
        return [str(i) for i in indices]
    words = in_words(images.class_names)
    return [words[int(images.labels[i])] for i in indices]


def _fit_colours(features: PatchFeatures, layers: list[int], names: list[str], images: list[int]) -> list[Colours]:
    """Fit a PCA colour map per layer to the patches of images, in one pass; print the share of the variance."""
    states = torch.cat(list(features.states(images, layers)), dim=1)
    patches = states.shape[1] * states.shape[2]
    maps = [Colours.of(layer) for layer in states]
    for name, colours in zip(names, maps, strict=True):
        share = 100 * float(colours.explained.sum())
        of_patches = f"{patches:,} patches of {len(images)} images"
        print(f"{name}: three components hold {share:.1f} % of the variance of {of_patches}")
    return maps


def _draw_clusters(options: Visualization, states: Tensor, name: str, truth: Tensor | None) -> dict[str, Tensor]:
    """Return columns of eigenvectors and clusters.

    With masks, print the mIoU and give the clusters the colours of the masks.
    """
    count = options.clusters or _count_clusters(truth)
    spectrum = spectral_clusters(states, count, options.neighbours, options.seed)
    columns = {f"eigenvectors 2 to 4\n{name}": on_grid(_to_bytes(spectrum.rgb()[:ROWS]))}
    if truth is None:
        painted = _paint(spectrum.labels[:ROWS], torch.arange(count))
    else:
        matched = _match_classes(spectrum.labels, truth, count, name)
        painted = _paint(matched[spectrum.labels[:ROWS]], truth)
    columns[f"{count} clusters\n{name}"] = on_grid(painted)
    return columns


def _count_clusters(truth: Tensor | None) -> int:
    """Return the default number of clusters: the number of classes in the masks if there are masks."""
    if truth is None:
        return CLUSTERS
    classes = truth[truth != IGNORED].unique()
    return max(2, len(classes))


def _match_classes(labels: Tensor, truth: Tensor, count: int, name: str) -> Tensor:
    """Return the class of each cluster by hungarian matching, IGNORED for none; print the mIoU of both matchings."""
    predicted = on_grid(labels, truth.shape[-1])
    for matching in ("greedy", "hungarian"):
        score = segmentation_miou(predicted, truth, matching)
        sizes = f"{count} clusters, {len(score.classes)} classes, {len(truth)} images"
        print(f"{name}: mIoU {100 * score.miou:.2f} %, {matching} matching, {sizes}, light spectral clustering")
    return torch.where(score.matched < 0, IGNORED, score.matched)


def _paint(labels: Tensor, every: Tensor) -> Tensor:
    """Return uint8 RGB with a colour for each value in `every`, except 255, which is ignored."""
    values = every[every != IGNORED].unique()
    largest = int(max(values.max(), IGNORED))
    colours = torch.full((largest + 1, 3), UNMATCHED, dtype=torch.uint8)
    colours[values] = distinct(len(values))
    return colours[labels]


def _to_bytes(rgb: Tensor) -> Tensor:
    """Convert [0, 1] to uint8."""
    return (255 * rgb).round().byte()


# ---- t-SNE


def choose_points(options: Visualization, images: ImageSource) -> tuple[list[int], list[int]]:
    """Choose the classes and images of a t-SNE, a fixed random choice.

    Returns:
        At most CLASSES classes, ascending, and the indices of at most `options.points` images of these classes.

    Raises:
        UserError: there are fewer than two classes, or fewer than FEWEST images.
    """
    if images.labels is None or len(images.class_names) < 2:
        raise UserError(f"{options.images} has no classes for the colours of t-SNE: leave tsne out of --views")
    classes = sorted(_shuffle(len(images.class_names))[:CLASSES])
    members = [i for i in _shuffle(len(images)) if int(images.labels[i]) in classes]
    points = members[: options.points]
    if len(points) < FEWEST:
        raise UserError(f"t-SNE needs {FEWEST} images or more, got {len(points)}: see --images and --points")
    return classes, points


def name_tsne_file(out: Path) -> Path:
    """Return the file of the t-SNE, beside `out`, the figure of patches."""
    return out.with_stem(f"{out.stem}_tsne")


def draw_tsne(
    options: Visualization,
    features: PatchFeatures,
    layers: Mapping[int, Layer],
    classes: list[int],
    points: list[int],
) -> None:
    """Draw the t-SNE of pooled features, one panel for each layer; print a summary.

    Args:
        options: options of the figure.
        features: patch features of the images.
        layers: the layers to draw, by number, ascending.
        classes: the classes, from `choose_points`.
        points: indices of the images, from `choose_points`.
    """
    images = features.images
    labels = torch.tensor([classes.index(int(images.labels[i])) for i in points])
    means = [states.mean(dim=2) for states in features.states(points, list(layers))]
    pooled = torch.cat(means, dim=1)  # (layers, points, d)
    if not pooled.isfinite().all():
        raise UserError(f"{features.title} has features with NaN or infinity: they have no t-SNE")
    perplexity = min(30.0, (len(points) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="pca", random_state=options.seed)
    panels = {}
    for (i, layer), x in zip(layers.items(), pooled, strict=True):
        panels[f"{i} {layer.name}"] = torch.from_numpy(tsne.fit_transform(x.numpy()))
    out = name_tsne_file(options.out)
    names = in_words([images.class_names[label] for label in classes])
    title = f"t-SNE of mean patch features: {features.title}\n{len(points)} of {images.name}, {features.level}"
    scatter(out, panels, labels, names, title)
    print(f"wrote {out}: {len(points)} images of {len(classes)} classes, perplexity {perplexity:g}")


def on_grid(values: Tensor, side: int | None = None) -> Tensor:
    """Arrange values (n, p, ...) of p = s s patches, row by row, as (n, s, s, ...).

    With `side`, enlarge the grid to side x side pixels by nearest neighbours.
    """
    cells = math.isqrt(values.shape[1])
    grid = values.unflatten(1, (cells, cells))
    if side is None:
        return grid
    place = (torch.arange(side) * cells // side).to(grid.device)
    return grid[:, place][:, :, place]
