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

if TYPE_CHECKING:  # other rooms are known by their interfaces alone
    from uvit_decay.data.masks import Masks
    from uvit_decay.evaluation.image_sources import ImageSource

ROWS = 16  # most images drawn; all are clustered
CLASSES = 10  # most classes in t-SNE; a fixed random choice if there are more
FEWEST = 5  # images that t-SNE needs
CLUSTERS = 6  # number of clusters without masks
UNMATCHED = 255  # grey level of clusters matched to no class, and of ignored pixels


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
        precision = "" if self.reader.precision == "float32" else f", {self.reader.precision}"
        return ("clean images" if self.reader.path is None else f"t = {self.time:g}") + precision

    def states(self, indices: Sequence[int], layers: Sequence[int]) -> Iterator[Float[Tensor, "layers b p d"]]:
        """Yield float32 patch states of these layers (ascending) on the CPU, batchwise; later ones never run."""
        first, where = self.reader.net.num_prefix_tokens, (self.images.read, indices, layers, self.time)
        patches = lambda state: state[:, first:].float()  # noqa: E731
        return self.reader.states(*where, self.seed, "pictures", reduce=patches, processes=Processes())


def _order(count: int) -> list[int]:
    """Return image indices in a fixed random order: folders are sorted by class, so the first are of few classes."""
    return torch.randperm(count, generator=generator("subset", "features")).tolist()


# ---- patches


def draw_patches(
    options: Visualization, features: PatchFeatures, layers: Mapping[int, Layer], masks: Masks | None
) -> None:
    """Draw principal components and clusters of patches, one row for each image; print a summary."""
    images, order = features.images, _order(len(features.images))
    candidates = range(len(order)) if masks is None else set(masks.members)
    shown = [i for i in order if i in candidates][: options.num]
    truth = masks.read(shown, images.shape[1]) if masks else None
    states = torch.cat(list(features.states(shown, list(layers))), dim=1)
    if math.isqrt(states.shape[2]) ** 2 != states.shape[2] or states.shape[2] < 4:
        raise UserError(f"{features.title} has {states.shape[2]} patch tokens, no grid: draw tsne alone, --views tsne")
    names = [f"{i} {layer.name}" for i, layer in layers.items()]
    colours = _colours(features, list(layers), names, order[: options.fit]) if "pca" in options.views else []
    columns = {"image": images.read(shown[:ROWS]).cpu().expand(-1, 3, -1, -1).permute(0, 2, 3, 1)}
    for k, name in enumerate(names):
        if colours:
            columns[f"PCA\n{name}"] = on_grid(_bytes(colours[k](states[k, :ROWS])))
        if "spectral" in options.views:
            columns |= _clusters(options, states[k], name, truth)
    if truth is not None:
        columns["mask"] = _painted(truth[:ROWS], truth)
    words = in_words(images.class_names)
    rows = [words[int(images.labels[i])] if images.labels is not None else str(i) for i in shown]
    about = f"{features.title}, {images.name}, {features.level}"
    image_table(options.out, columns, rows[:ROWS], about)
    print(f"wrote {options.out}: {len(rows[:ROWS])} images of {images.name}")


def _colours(features: PatchFeatures, layers: list[int], names: list[str], images: list[int]) -> list[Colours]:
    """Fit a PCA colour map per layer to the patches of images, of which one pass is made."""
    states = torch.cat(list(features.states(images, layers)), dim=1)
    maps = [Colours.of(layer) for layer in states]
    for name, colours in zip(names, maps, strict=True):
        share, patches = 100 * float(colours.explained.sum()), f"{states[0, ..., 0].numel():,} patches"
        print(f"{name}: three components hold {share:.1f} % of the variance of {patches} of {len(images)} images")
    return maps


def _clusters(options: Visualization, states: Tensor, name: str, truth: Tensor | None) -> dict[str, Tensor]:
    """Return columns of eigenvectors and clusters; with masks, print the mIoU and give clusters the masks' colours."""
    count = options.clusters or (CLUSTERS if truth is None else max(2, len(truth[truth != IGNORED].unique())))
    spectrum = spectral_clusters(states, count, options.neighbours, options.seed)
    columns = {f"eigenvectors 2 to 4\n{name}": on_grid(_bytes(spectrum.rgb()[:ROWS]))}
    if truth is None:
        return {**columns, f"{count} clusters\n{name}": on_grid(_painted(spectrum.labels[:ROWS], torch.arange(count)))}
    predicted = on_grid(spectrum.labels, truth.shape[-1])
    for matching in ("greedy", "hungarian"):
        score = segmentation_miou(predicted, truth, matching)
        sizes = f"{count} clusters, {len(score.classes)} classes, {len(truth)} images"
        print(f"{name}: mIoU {100 * score.miou:.2f} %, {matching} matching, {sizes}, light spectral clustering")
    named = torch.where(score.matched < 0, IGNORED, score.matched)[spectrum.labels[:ROWS]]
    return {**columns, f"{count} clusters\n{name}": on_grid(_painted(named, truth))}


def _painted(labels: Tensor, every: Tensor) -> Tensor:
    """Return uint8 RGB with a colour for each value in `every`, except 255, which is ignored."""
    values = every[every != IGNORED].unique()
    colours = torch.full((int(max(values.max(), IGNORED)) + 1, 3), UNMATCHED, dtype=torch.uint8)
    colours[values] = distinct(len(values))
    return colours[labels]


def _bytes(rgb: Tensor) -> Tensor:
    """Convert [0, 1] to uint8."""
    return (255 * rgb).round().byte()


# ---- t-SNE


def choose_points(options: Visualization, images: ImageSource) -> tuple[list[int], list[int]]:
    """Choose at most CLASSES classes, and images of them; a UserError says if there are too few of either."""
    if images.labels is None or len(images.class_names) < 2:
        raise UserError(f"t-SNE colours classes, which {options.images} has not: leave tsne out of --views")
    classes = sorted(_order(len(images.class_names))[:CLASSES])
    points = [i for i in _order(len(images)) if int(images.labels[i]) in classes][: options.points]
    if len(points) < FEWEST:
        raise UserError(f"t-SNE needs {FEWEST} images or more, got {len(points)}: see --images and --points")
    return classes, points


def tsne_file(out: Path) -> Path:
    """Return the name of the t-SNE beside that of the patches."""
    return out.with_stem(f"{out.stem}_tsne")


def draw_tsne(
    options: Visualization, features: PatchFeatures, layers: Mapping[int, Layer], classes: list[int], points: list[int]
) -> None:
    """Draw the t-SNE of the pooled features of the images `points`, one panel for each layer; print a summary."""
    images = features.images
    labels = torch.tensor([classes.index(int(images.labels[i])) for i in points])
    pooled = torch.cat([states.mean(dim=2) for states in features.states(points, list(layers))], dim=1)
    if not pooled.isfinite().all():
        raise UserError("features with NaN or infinity have no t-SNE")
    perplexity = min(30.0, (len(points) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="pca", random_state=options.seed)
    panels = {
        f"{i} {layer.name}": torch.from_numpy(tsne.fit_transform(x.numpy()))
        for (i, layer), x in zip(layers.items(), pooled, strict=True)
    }
    out = tsne_file(options.out)
    names = in_words([images.class_names[label] for label in classes])
    title = f"t-SNE of mean patch features: {features.title}\n{len(points)} of {images.name}, {features.level}"
    scatter(out, panels, labels, names, title)
    print(f"wrote {out}: {len(points)} images of {len(classes)} classes, perplexity {perplexity:g}")


def on_grid(values: Tensor, side: int | None = None) -> Tensor:
    """Arrange values (n, p, ...) of p = s s patches, in rows, as (n, s, s, ...).

    With `side`, the grid is enlarged to side x side pixels by nearest neighbours.
    """
    cells = math.isqrt(values.shape[1])
    grid = values.unflatten(1, (cells, cells))
    if side is None:
        return grid
    place = (torch.arange(side) * cells // side).to(grid.device)
    return grid[:, place][:, :, place]
