"""Visualisation of features: principal components and spectral clusters of patches, t-SNE of pooled features.

The clusters come from a light spectral clustering (`metrics/patches.py`), not from the full method of the paper's
figure, which also learns a segmentation of attention values: their mIoU is not comparable with the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from uvit_decay.representations.options import Probing
from uvit_decay.runtime.command_line import Bounds
from uvit_decay.runtime.errors import UserError
from uvit_decay.sampling_options import Count, LoadingOptions, Seed

if TYPE_CHECKING:
    from torch import Tensor

    from uvit_decay.data.masks import Masks
    from uvit_decay.evaluation.image_sources import ImageSource
    from uvit_decay.nn.intermediates import Layer
    from uvit_decay.representations.patch_features import PatchFeatures

ROWS = 16  # most images drawn; all are clustered
CLASSES = 10  # most classes in t-SNE; a fixed random choice if there are more
FEWEST = 5  # images that t-SNE needs
CLUSTERS = 6  # number of clusters without masks
UNMATCHED = 255  # grey level of clusters matched to no class, and of ignored pixels


@dataclass(frozen=True, kw_only=True)
class Visualization(LoadingOptions):
    """What is drawn.

    Args:
        ckpt: a .ckpt or .safetensors.
        images: folder, zip, tar, .npz or data set, such as digits:test.
        layer: comma-separated numbers or names; default: the middle one.
        time: noise level in (0, 1).
        num: images to look at, the first 16 are drawn.
        views: what to draw.
        masks: folder of PNGs named as the images: values are classes, 255 none.
        clusters: default: the number of classes in the masks, or 6.
        neighbours: of a patch in spectral clustering.
        fit: images that the colours of pca are of.
        points: images in t-SNE.
        seed: of noise, k-means and t-SNE.
        batch_size: images at a time.
        vae: autoencoder that encodes for latents; default: the checkpoint's.
        out: t-SNE's has _tsne in its name.
    """

    ckpt: Path
    images: Annotated[str, "--pictures"]
    layer: tuple[str, ...] | None = None
    time: float = 0.1
    num: Count = 8
    views: tuple[Literal["pca", "spectral", "tsne"], ...] = ("pca", "spectral")
    masks: Path | None = None
    clusters: Annotated[int, Bounds(2, 255)] | None = None
    neighbours: Annotated[int, Bounds(1, 2**16)] = 50
    fit: Count = 256
    points: Count = 1000
    seed: Seed = 0
    batch_size: Count = 64
    vae: str | None = None
    out: Path = Path("features.png")


def features(options: Visualization) -> None:
    """Patch features as colours, clusters, t-SNE."""
    _check(options)
    from uvit_decay.runtime.distributed import Processes

    with Processes.launched() as processes:
        if processes.is_main:
            visualize(options, processes.local_rank)


def visualize(options: Visualization, local_rank: int = 0) -> None:
    """Write the figures and print a summary of each.

    Raises:
        UserError: invalid options, or what the checkpoint, images and masks raise.
    """
    from uvit_decay import checkpoint
    from uvit_decay.nn.intermediates import layer_indices
    from uvit_decay.representations.patch_features import PatchFeatures
    from uvit_decay.runtime.files import check_writable, claimed
    from uvit_decay.samples import pick_device

    check_writable(options.out)
    loaded = checkpoint.load(options.ckpt, options.weights, options.trust)
    device = pick_device(options.device, local_rank)
    patches = PatchFeatures.of(
        loaded, options.images, device, options.time, options.seed, options.batch_size, options.vae
    )
    layers = loaded.net.layers
    chosen = {i: layers[i] for i in layer_indices(layers, options.layer or (str(len(layers) // 2),))}
    masks = _masks(options.masks, patches.images) if options.masks else None
    classes, points = _points(options, patches.images) if "tsne" in options.views else ([], [])
    with claimed(options.out):
        if set(options.views) != {"tsne"}:
            _table(options, patches, chosen, masks)
        if points:
            _map(options, patches, chosen, classes, points)


def _masks(folder: Path, images: ImageSource) -> Masks:
    from uvit_decay.data.masks import Masks
    from uvit_decay.evaluation.image_sources import FileImages

    if not isinstance(images, FileImages):
        raise UserError("--masks needs images with names: a folder, zip or tar of them")
    return Masks.of(folder, images.listing)


def _check(options: Visualization) -> None:
    Probing((options.time,))  # raises a UserError for a time outside (0, 1)
    if options.masks and "spectral" not in options.views:
        raise UserError("--masks are compared with spectral clusters: add spectral to --views")


def _order(count: int) -> list[int]:
    """Return image indices in a fixed random order: folders are sorted by class, so the first are of few classes."""
    import torch

    from uvit_decay.runtime.random import generator

    return torch.randperm(count, generator=generator("subset", "features")).tolist()


# ---- patches


def _table(
    options: Visualization,
    features: PatchFeatures,
    chosen: dict[int, Layer],
    masks: Masks | None,
) -> None:
    """Draw the figure of patches, one row for each image."""
    import torch

    from uvit_decay.plots import image_table
    from uvit_decay.representations.patch_features import on_grid

    images, order = features.images, _order(len(features.images))
    candidates = range(len(order)) if masks is None else set(masks.members)
    shown = [i for i in order if i in candidates][: options.num]
    truth = masks.read(shown, images.shape[1]) if masks else None
    states = torch.cat(list(features.states(shown, list(chosen))), dim=1)
    names = [f"{i} {layer.name}" for i, layer in chosen.items()]
    colours = _colours(options, features, order, list(chosen), names) if "pca" in options.views else []
    columns = {"image": _rgb(images.read(shown[:ROWS]))}
    for k, name in enumerate(names):
        if colours:
            columns[f"PCA\n{name}"] = on_grid(_bytes(colours[k](states[k, :ROWS])))
        if "spectral" in options.views:
            columns |= _clusters(options, states[k], name, truth)
    if truth is not None:
        columns["mask"] = _painted(truth[:ROWS], truth)
    rows = [images.class_names[int(images.labels[i])] if images.labels is not None else str(i) for i in shown]
    about = f"{options.ckpt.name}, {images.name}, t = {options.time:g}"
    image_table(options.out, columns, rows[:ROWS], about)
    print(f"wrote {options.out}: {len(rows[:ROWS])} images of {images.name}")


def _colours(
    options: Visualization, features: PatchFeatures, order: list[int], places: list[int], names: list[str]
) -> list[Colours]:
    """Fit a PCA colour map per layer in one pass over the images."""
    from uvit_decay.representations.patches import PatchPCA

    fits, fitted = [PatchPCA() for _ in places], order[: options.fit]
    for states in features.states(fitted, places):
        for fit, layer in zip(fits, states, strict=True):
            fit.update(layer)
    found = [fit.colours() for fit in fits]
    for name, colours in zip(names, found, strict=True):
        share, patches = 100 * float(colours.explained.sum()), f"{fits[0].count:,} patches of {len(fitted)} images"
        print(f"{name}: three components hold {share:.1f} % of the variance of {patches}")
    return found


def _clusters(options: Visualization, states: Tensor, name: str, truth: Tensor | None) -> dict[str, Tensor]:
    """Return columns of eigenvectors and clusters; with masks, print the mIoU and give clusters the masks' colours."""
    import torch

    from uvit_decay.representations.patch_features import on_grid
    from uvit_decay.representations.patches import IGNORED, segmentation_miou, spectral_clusters

    count = options.clusters or (CLUSTERS if truth is None else max(2, len(truth[truth != IGNORED].unique())))
    found = spectral_clusters(states, count, options.neighbours, options.seed)
    columns = {f"eigenvectors 2 to 4\n{name}": on_grid(_bytes(found.rgb()[:ROWS]))}
    if truth is None:
        return {**columns, f"{count} clusters\n{name}": on_grid(_painted(found.labels[:ROWS], torch.arange(count)))}
    predicted = on_grid(found.labels, truth.shape[-1])
    for matching in ("greedy", "hungarian"):
        score = segmentation_miou(predicted, truth, matching)
        sizes = f"{count} clusters, {len(score.classes)} classes, {len(truth)} images"
        print(f"{name}: mIoU {100 * score.miou:.2f} %, {matching} matching, {sizes}, light spectral clustering")
    named = torch.where(score.matched < 0, IGNORED, score.matched)[found.labels[:ROWS]]
    return {**columns, f"{count} clusters\n{name}": on_grid(_painted(named, truth))}


def _painted(labels: Tensor, every: Tensor) -> Tensor:
    """Return uint8 RGB with a colour for each value in `every`, except 255, which is ignored."""
    import torch

    from uvit_decay.plots import distinct
    from uvit_decay.representations.patches import IGNORED

    values = every[every != IGNORED].unique()
    colours = torch.full((int(max(values.max(), IGNORED)) + 1, 3), UNMATCHED, dtype=torch.uint8)
    colours[values] = distinct(len(values))
    return colours[labels]


def _bytes(rgb: Tensor) -> Tensor:
    """Convert [0, 1] to uint8."""
    return (255 * rgb).round().byte()


def _rgb(images: Tensor) -> Tensor:
    """Convert images (n, 1 or 3, h, w) to (n, h, w, 3)."""
    return images.cpu().expand(-1, 3, -1, -1).permute(0, 2, 3, 1)


# ---- t-SNE


def _points(options: Visualization, images: ImageSource) -> tuple[list[int], list[int]]:
    """Choose at most CLASSES classes, and images of them."""
    if images.labels is None or len(images.class_names) < 2:
        raise UserError(f"t-SNE colours classes, which {options.images} has not: leave tsne out of --views")
    classes = sorted(_order(len(images.class_names))[:CLASSES])
    points = [i for i in _order(len(images)) if int(images.labels[i]) in classes][: max(0, options.points)]
    if len(points) < FEWEST:
        raise UserError(f"t-SNE needs {FEWEST} images or more, got {len(points)}: see --images and --points")
    return classes, points


def _map(
    options: Visualization,
    features: PatchFeatures,
    chosen: dict[int, Layer],
    classes: list[int],
    points: list[int],
) -> None:
    """Draw the t-SNE of pooled features, one panel for each layer."""
    import torch
    from sklearn.manifold import TSNE

    from uvit_decay.plots import scatter

    images = features.images
    labels = torch.tensor([classes.index(int(images.labels[i])) for i in points])
    pooled = torch.cat([states.mean(dim=2) for states in features.states(points, list(chosen))], dim=1)
    if not pooled.isfinite().all():
        raise UserError("features with NaN or infinity have no t-SNE")
    perplexity = min(30.0, (len(points) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="pca", random_state=options.seed)
    panels = {
        f"{i} {layer.name}": torch.from_numpy(tsne.fit_transform(x.numpy()))
        for (i, layer), x in zip(chosen.items(), pooled, strict=True)
    }
    out = options.out.with_stem(f"{options.out.stem}_tsne")
    names = [images.class_names[label] for label in classes]
    title = f"t-SNE of mean patch features: {options.ckpt.name}\n{len(points)} of {images.name}, t = {options.time:g}"
    scatter(out, panels, labels, names, title)
    print(f"wrote {out}: {len(points)} images of {len(classes)} classes, perplexity {perplexity:g}")
