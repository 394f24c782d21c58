"""Draw patch features of real images, as Figures 1 and 3 of the decay paper: `python examples/feature_figures.py`.

The first figure has a row for each image: principal components of its patches as colours, and spectral clusters of the
patches of these images. The second figure is the t-SNE of the images' mean patch features. Examples of networks and
images:

    python examples/feature_figures.py --ckpt checkpoints/digits.safetensors --images digits:test --layer 4
    python examples/feature_figures.py --ckpt timm:vit_base_patch16_224.mae --images photographs --size 224 --layer 12
"""

import argparse
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.cluster import SpectralClustering
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE, spectral_embedding
from sklearn.metrics.pairwise import cosine_similarity
from torch import Tensor

from uvit_decay.encoders import ProbedNetwork, open_network
from uvit_decay.evaluation import ImageSource, open_images
from uvit_decay.generation.options import LoadingOptions
from uvit_decay.nn import states_of

CHECKPOINT = Path(__file__).resolve().parents[1] / "checkpoints" / "digits.safetensors"
CLASSES = 10  # in the t-SNE; more colours are hard to distinguish
PERCENTILES = (1, 99)  # values outside are saturated, so that a single outlier does not make all others grey
FLOOR = 0.1  # patches with a cosine similarity up to this are not connected


@torch.no_grad()
def read_patches(network: ProbedNetwork, images: Tensor, layer: int, time: float) -> Tensor:
    """Return the patch states (b, p, d) of a layer.

    A denoiser sees images with noise of the level `time`, without their class; an encoder sees clean images.

    Args:
        network: the network.
        images: uint8 images (b, c, h, w).
        layer: number of the layer; 0 is the embeddings.
        time: noise level of a denoiser's images, in (0, 1).
    """
    x = images.float() / 127.5 - 1
    conditions = []
    if not network.is_encoder:
        t = torch.full((len(x),), time)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
        x = network.path.add_noise(x, noise, t)
        conditions.append(t)
    (states,) = states_of(network.net, [layer], x, *conditions)
    return states[:, network.net.num_prefix_tokens :].float()


def to_rgb(values: np.ndarray) -> np.ndarray:
    """Scale the columns of (patches, 3) to [0, 1]."""
    low, high = np.percentile(values, PERCENTILES, axis=0)
    return ((values - low) / np.maximum(high - low, 1e-12)).clip(0, 1)


def draw_patches(patches: Tensor, images: Tensor, rows: int, clusters: int, out: Path) -> None:
    """Save images, principal components and clusters of their patches, for the first `rows` images.

    The components are those of the patches of all images. The clusters (Ng, Jordan and Weiss, 2001) are those of the
    patches of these rows together.
    """
    features = patches.flatten(0, 1).double().numpy()
    shown = features[: rows * patches.shape[1]]
    pca = PCA(3).fit(features)
    share = 100 * pca.explained_variance_ratio_.sum()
    print(f"three principal components hold {share:.0f} % of the variance of {len(patches)} images' patches")
    similar = cosine_similarity(shown - shown.mean(axis=0))
    affinity = np.where(similar > FLOOR, similar, 0)
    eigenvectors = spectral_embedding(affinity, n_components=3, random_state=0)
    labels = SpectralClustering(clusters, affinity="precomputed", random_state=0).fit_predict(affinity)
    side = math.isqrt(patches.shape[1])
    grid = (rows, side, side)  # patches are in the order of rows
    columns = {
        "image": images[:rows].expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy(),
        "principal components": to_rgb(pca.transform(features))[: len(shown)].reshape(*grid, 3),
        "eigenvectors 2 to 4": to_rgb(eigenvectors).reshape(*grid, 3),
        f"{clusters} clusters": labels.reshape(grid),
    }
    size = (1.5 * len(columns), 1.5 * rows)
    figure, table = plt.subplots(rows, len(columns), figsize=size, squeeze=False, layout="constrained")
    for (title, pictures), cells in zip(columns.items(), table.T, strict=True):
        cells[0].set_title(title, fontsize=9)
        for axes, picture in zip(cells, pictures, strict=True):
            axes.imshow(picture, cmap="tab10", vmin=0, vmax=9, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
    figure.savefig(out, dpi=120)
    print(f"wrote {out}")


def draw_tsne(patches: Tensor, labels: Tensor, names: tuple[str, ...], out: Path) -> None:
    """Save the t-SNE of the mean patch features, with a colour for each class."""
    perplexity = min(30.0, (len(patches) - 1) / 3)
    points = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(patches.mean(dim=1).numpy())
    figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
    for label in labels.unique().tolist()[:CLASSES]:
        x, y = points[labels == label].T
        axes.scatter(x, y, s=14, color=f"C{label % CLASSES}", label=names[label])
    axes.set(xticks=[], yticks=[], title=f"t-SNE of mean patch features, {len(patches)} images")
    figure.legend(loc="outside center right")
    figure.savefig(out, dpi=120)
    print(f"wrote {out}")


def choose_images(source: ImageSource, count: int) -> list[int]:
    """Choose images at random: folders are sorted by class, so that the first images are of few classes."""
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))
    return order[:count].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, default=CHECKPOINT, help="a checkpoint, or timm:NAME; no latents")
    parser.add_argument("--images", default="digits:test", help="a folder, zip, tar, .npz or data set")
    parser.add_argument("--size", type=int, help="side to which image files are cropped; default: the network's")
    parser.add_argument("--layer", type=int, default=4, help="0 is the embeddings; default: 4")
    parser.add_argument("--time", type=float, default=0.1, help="noise level of a denoiser's images; default: 0.1")
    parser.add_argument("--rows", type=int, default=6, help="images in the first figure; default: 6")
    parser.add_argument("--points", type=int, default=300, help="images in the t-SNE; default: 300")
    parser.add_argument("--clusters", type=int, default=4, help="default: 4")
    parser.add_argument("--out", type=Path, default=Path("features.png"), help="t-SNE's has _tsne in its name")
    options = parser.parse_args()

    network = open_network(options.ckpt, LoadingOptions())
    source = open_images(options.images, network.net.channels, options.size or network.net.image_size)
    chosen = choose_images(source, options.points)
    images = source.read(chosen)
    batches = images.split(50)
    patches = torch.cat([read_patches(network, batch, options.layer, options.time) for batch in batches])
    draw_patches(patches, images, options.rows, options.clusters, options.out)
    if source.labels is not None:
        out = options.out.with_stem(f"{options.out.stem}_tsne")
        draw_tsne(patches, source.labels[chosen], source.class_names, out)


if __name__ == "__main__":
    main()
