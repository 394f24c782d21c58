"""Probes of a network's features: linear classifiers, kNN and effective rank at every layer and noise level.

The network is frozen, in eval mode. A denoiser gets the null label, so that no class leaks, and an image has one fixed
noise for each level; an encoder sees clean images, the single level t = 0. One forward pass over the images gives all
layers of a level (if they fit, see FEATURES); the classifiers of all layers are trained at once. Every choice, of an l2
penalty or of the best cell, is made on held-out training images.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from uvit_decay.nn.intermediates import HasIntermediates, check_pool, layer_indices, pooled_features
from uvit_decay.representations.effective_rank import effective_rank
from uvit_decay.representations.grid import SCORES, Grid
from uvit_decay.representations.knn import knn_accuracy
from uvit_decay.representations.logistic import logistic_grid
from uvit_decay.representations.options import Classification, Probing
from uvit_decay.runtime.cost import estimated_seconds
from uvit_decay.runtime.distributed import COMPARED, Processes, batches
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.overlap import on_cpu, read_ahead
from uvit_decay.runtime.precision import Precision, computing
from uvit_decay.runtime.program import localised
from uvit_decay.runtime.random import indices_on, normal, subset
from uvit_decay.runtime.threads import free_threads, in_threads

if TYPE_CHECKING:  # other rooms are known by their interfaces alone
    from uvit_decay.data import ImageData
    from uvit_decay.data.batches import ImageSet
    from uvit_decay.diffusion.noise_path import NoisePath

FEATURES = 2**31  # bytes of features held at once; below 4 GiB with the working memory of the probes
SMALL = 2**28  # bytes of features of levels that are computed at the same time on a CPU
READING = Lock()  # image files are read by one thread at a time
CHUNK = 4096  # training samples compared with the test samples at a time


def network_inputs(
    path: NoisePath | None, x: Float[Tensor, "b c h w"], time: float, numbers: Sequence[int], *key: str | int
) -> tuple[Tensor, ...]:
    """Return the arguments of a network for the clean images x.

    A denoiser takes x at noise level `time` and times (b,); the noise depends on `key` and an image's number. An
    encoder, whose path is None, takes x alone.
    """
    if path is None:
        return (x,)
    noise = normal("probe", *key, rows=indices_on(x.device, numbers), shape=x.shape[1:])
    t = torch.full((len(x),), time, device=x.device)
    return path.add_noise(x, noise, t), t


def probed_images(probing: Probing | Classification, data: ImageData) -> tuple[list[int], list[int]]:
    """Return the indices of the training and of the test images that are probed, fixed random choices."""
    return subset(data.train, probing.max_train, "probe train"), subset(data.test, probing.max_test, "probe test")


def usual_layer(net: HasIntermediates, path: NoisePath | None) -> int:
    """Return the layer that is judged by default: U-ViT's middle block, SiT's last encoder block, an encoder's last."""
    return len(net.layers) - 1 if path is None else len(net.layers) // 2


def check_network(net: object, path: NoisePath | None) -> None:
    """Raise a UserError if the network has no features, or is a denoiser that has none without a label."""
    if not isinstance(net, HasIntermediates):
        raise UserError(f"{type(net).__name__} has no layers to probe: remove LinearProbes from the callbacks")
    if path is not None and net.num_classes and not net.null_label:
        raise UserError(
            "features are read under the null label, which this network was trained without: set null_label to true, "
            "or remove LinearProbes from the callbacks"
        )


def check_labelled(data: ImageData) -> None:
    """Raise a UserError unless there are test images, of two classes or more."""
    if data.test is None or len(data.class_names) < 2:
        text = (
            "probes need test images of two classes or more: name some (evaluate.py: --test; train.py: "
            "--data.test_path or --data.holdout 0.1), or in train.py remove LinearProbes"
        )
        raise UserError(localised(text))


def check_probed(net: object, path: NoisePath | None, data: ImageData, probing: Probing) -> None:
    """Raise a UserError if the network, a denoiser with this path or an encoder, cannot be probed on these data."""
    check_network(net, path)
    check_labelled(data)
    probing.levels(path is None)
    layer_indices(net.layers, probing.layers)
    check_pool(net, probing.pool)
    if min(len(data.train), probing.max_train) < probing.neighbours:
        raise UserError(f"{probing.neighbours} nearest neighbours need as many training images")


@dataclass(frozen=True)
class Prober:
    """A network with the noise path of its input, the data to probe it on, and the precision of its features.

    An encoder has no noise path: None means that it sees clean images.
    """

    net: HasIntermediates
    path: NoisePath | None
    data: ImageData
    probing: Probing
    device: torch.device
    precision: Precision = "float32"

    @property
    def times(self) -> tuple[float, ...]:
        """The noise levels; an encoder has one, 0."""
        return self.probing.levels(self.path is None)

    def grid(self, processes: Processes, show: bool = False) -> Grid | None:
        """Compute all cells, with the noise levels shared among the processes; return None on all but the first."""
        levels = range(len(self.times))
        if processes.size > 1:
            processes.check_same(f"images of {self.data.name}, or options", self._content())
        rows = []
        with tqdm(total=len(levels), unit="level", desc="probes", disable=not (show and processes.is_main)) as bar:
            for row in self._rows(levels, processes):
                rows.append(row)
                bar.update()
        if not processes.is_main:
            return None
        layers = {i: self.net.layers[i] for i in self._chosen_layers()}
        scores = {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(SCORES)}
        return Grid(layers, self.times, scores, self.protocol())

    def _rows(self, levels: range, processes: Processes) -> Iterator[Tensor]:
        """Yield the scores of the levels on the first process; on a CPU idle cores compute others that are small."""
        room = SMALL // self._bytes(len(self._chosen_layers()))
        threads = min(len(levels), free_threads(), room) if self.device.type == "cpu" and processes.size == 1 else 1
        if threads > 1:
            with computing(self.device, self.precision):  # a setting of all threads, which `_features` then leaves
                yield from in_threads(self._level, levels, threads)
        else:
            yield from processes.map_ordered(levels, self._level)

    @torch.no_grad()
    def estimated_seconds(self, count: int) -> float:
        """Estimate the seconds of the features of `count` images, each at one level, on this device."""

        def features(batch: int) -> Tensor:
            x = torch.zeros(batch, self.net.channels, self.net.image_size, self.net.image_size, device=self.device)
            inputs = network_inputs(self.path, x, self.times[0], range(batch), 0)
            return pooled_features(self.net, *inputs, pool=self.probing.pool)

        with computing(self.device, self.precision):
            return estimated_seconds(features, count, self.probing.batch_size)

    def protocol(self) -> dict[str, Any]:
        """Return everything that the numbers depend on, except the weights, as plain values."""
        train, test = probed_images(self.probing, self.data)
        return {
            "data": self.data.name,
            "train": len(train),
            "test": len(test),
            **asdict(self.probing),
            "times": list(self.times),
            **({"input": "clean images"} if self.path is None else {"label": "null"}),
            **({} if self.precision == "float32" else {"precision": self.precision}),
            "classifier": "logistic regression, l2 penalty chosen on a held-out fifth of the training images",
            "knn": f"cosine, {'equal votes' if self.probing.uniform else 'votes exp(similarity / 0.07)'}",
        }

    def _content(self) -> list[Any]:
        """Return values that are the same on another node if the images and the options are."""
        sets = (self.data.train, self.data.test)
        few = [images[subset(images, COMPARED, "compared")][0] for images in sets]
        return [self.protocol(), [zlib.crc32(images.cpu().contiguous().numpy()) for images in few]]

    def _level(self, level: int) -> Tensor:
        """Return the scores of one noise level, (scores, layers), float64."""
        parts = []
        for layers in self._groups():
            train, labels, test, test_labels = self.features(level, layers)
            linear = logistic_grid(train, labels, test, test_labels, device=self.device)
            chunks = train.split(CHUNK, dim=1)
            vote = {"k": self.probing.neighbours, "uniform": self.probing.uniform}
            knn = knn_accuracy(chunks, labels, test.to(self.device), test_labels, **vote)
            columns = (linear.held_out, linear.test, linear.every_test.amax(1), linear.l2, knn, *self._ranks(test))
            parts.append(torch.stack([column.double() for column in columns]))
        return torch.cat(parts, dim=1)

    def _ranks(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Return the effective rank as the paper defines it, and as a number of dimensions."""
        cells = cells.to("cpu" if self.device.type == "mps" else self.device)  # Apple's GPUs lack float64
        literal = [effective_rank(cell) for cell in cells]
        return torch.tensor(literal), torch.tensor([effective_rank(cell, "feature", exp=True) for cell in cells])

    def _groups(self) -> list[list[int]]:
        """Return groups of layers whose features are held together: a single group, if it fits into FEATURES."""
        layers, size = self._chosen_layers(), max(1, FEATURES // self._bytes(1))
        return [layers[i : i + size] for i in range(0, len(layers), size)]

    def _chosen_layers(self) -> list[int]:
        return layer_indices(self.net.layers, self.probing.layers)

    def _bytes(self, layers: int) -> int:
        """Return the bytes of the features of so many layers."""
        return 4 * layers * sum(map(len, probed_images(self.probing, self.data))) * self.net.dim

    def features(self, level: int, layers: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return features, float32 (layers, n, d), and labels, int64 (n,), of training and of test images, on the CPU.

        `level` is the index of the noise level; `layers` are numbers of layers, None for all that are probed.
        """
        train, test = probed_images(self.probing, self.data)
        layers = layers or self._chosen_layers()
        train_features = self._features(self.data.train, train, "train", level, layers)
        test_features = self._features(self.data.test, test, "test", level, layers)
        return train_features, self.data.train.labels[train], test_features, self.data.test.labels[test]

    @torch.no_grad()
    def _features(self, images: ImageSet, chosen: list[int], split: str, level: int, layers: list[int]) -> Tensor:
        """Return features of the images `chosen`, float32 (layers, n, d), on the CPU; batches are written in place."""
        out = torch.empty(len(layers), len(chosen), self.net.dim)
        jobs = batches(len(chosen), self.probing.batch_size, 1)

        def read(rows: range) -> Tensor:
            with READING:
                return images[chosen[rows.start : rows.stop]][0]

        def features(x: Tensor, rows: range) -> Tensor:
            x, part = self.data.network_input(x.to(self.device, non_blocking=True)), chosen[rows.start : rows.stop]
            inputs = network_inputs(self.path, x, self.times[level], part, self.probing.seed, split, level)
            with computing(self.device, self.precision):
                found = pooled_features(self.net, *inputs, pool=self.probing.pool)
            return torch.stack([found[layer] for layer in layers])  # a list as index would be copied to the device

        with closing(read_ahead(read, jobs, self.device)) as stored:
            for rows, found in zip(jobs, on_cpu(map(features, stored, jobs)), strict=True):
                out[:, rows.start : rows.stop] = found
        return out
