"""Probes of a network's features at every layer and noise level, by the protocols of `protocols`.

The network is frozen. An image has one fixed noise for each level and draw, and for each pass of a protocol with fresh
noise. An encoder sees clean images, the single level t = 0. One forward pass over the images gives all layers of a
level, if they fit into FEATURES bytes. The classifiers of all layers are trained at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.nn.intermediates import HasIntermediates, Pool, check_pool, has_class_token, layer_indices
from uvit_decay.representations.features import TokenReader
from uvit_decay.representations.grid import NOISE_SCORES, OF_CLASS_TOKENS, RANKS, Grid
from uvit_decay.representations.noise import measure_noise_share
from uvit_decay.representations.options import CLASSIFYING, Classification, Probing
from uvit_decay.representations.protocols import Cells, Protocol, find_protocol
from uvit_decay.representations.reference import NEIGHBOURS, Reference
from uvit_decay.runtime.concurrency import free_threads, in_threads
from uvit_decay.runtime.distributed import COMPARED, Processes
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.precision import Precision, computing
from uvit_decay.runtime.program import localise
from uvit_decay.runtime.progress import track
from uvit_decay.runtime.random import subset

if TYPE_CHECKING:  # data are Lightning's
    from uvit_decay.data import ImageData

FEATURES = 2**31  # bytes of features in memory at once; below 4 GiB with the working memory of the probes
SMALL = 2**28  # bytes of features of levels that are computed at the same time on a CPU


def choose_images(probing: Probing | Classification, data: ImageData) -> tuple[list[int], list[int]]:
    """Return the indices of the training images and of the test images to probe: fixed random choices."""
    train = subset(data.train, probing.max_train, "probe train")
    test = subset(data.test, probing.max_test, "probe test")
    return train, test


def default_layer(net: HasIntermediates, path: NoisePath | None) -> int:
    """Return the index of the default layer: U-ViT's middle, SiT's last encoder block, an encoder's last block."""
    if path is None:
        return len(net.layers) - 1
    return len(net.layers) // 2


def check_network(net: object, path: NoisePath | None) -> None:
    """Raise a UserError if the network has no readable features, or is a denoiser without a null label."""
    if not isinstance(net, HasIntermediates):
        raise UserError(
            f"{type(net).__name__} cannot be probed: it has no forward_intermediates; add it (docs/extending.md), or "
            "remove LinearProbes from the callbacks"
        )
    if path is not None and net.num_classes and not net.null_label:
        advice = "train with null_label true, or remove LinearProbes from the callbacks"
        raise UserError(f"this network cannot be probed: it was trained without the null label; {advice}")


def check_labelled(data: ImageData) -> None:
    """Raise a UserError unless there are test images and two classes or more."""
    if data.test is None or len(data.class_names) < 2:
        text = (
            "probes need test images and two classes or more: give test images (evaluate.py: --test; train.py: "
            "--data.test_path or --data.holdout 0.1), or remove LinearProbes in train.py"
        )
        raise UserError(localise(text))


def check_probed(net: object, path: NoisePath | None, data: ImageData, probing: Probing) -> None:
    """Raise a UserError if the network cannot be probed on this data.

    Args:
        net: the network.
        path: noise path of a denoiser's input; None for an encoder.
        data: training and test images.
        probing: the options of the probes.
    """
    protocol = find_protocol(probing.protocol)
    check_network(net, path)
    probing.levels(path is None)
    layer_indices(net.layers, probing.layers)
    if probing.noise_share_draws and (data.test is None or len(data.test) < 2):
        raise UserError("a noise share needs two test images or more: give them (evaluate.py: --test)")
    if not protocol.classifies:
        return
    check_labelled(data)
    check_pool(net, probing.pool)
    train, _ = choose_images(probing, data)
    protocol.check(data.train.labels[train], data.class_names, probing)
    fewest = NEIGHBOURS + 2
    if protocol.aligned and min(len(data.test), probing.max_test) < fewest:
        raise UserError(f"an alignment by {NEIGHBOURS} nearest neighbours needs at least {fewest} test images")


@dataclass(frozen=True)
class Prober:
    """Probes of all layers of a network at all noise levels.

    Args:
        net: the network, in eval mode.
        path: noise path of a denoiser's input; None for an encoder, which sees clean images.
        data: the images and labels.
        probing: the options of the probes.
        device: device of the network and of the probes.
        precision: precision of the network.
        reference: features of another network, for protocols that compute an alignment.
    """

    net: HasIntermediates
    path: NoisePath | None
    data: ImageData
    probing: Probing
    device: torch.device
    precision: Precision = "float32"
    reference: Reference | None = None

    @property
    def times(self) -> tuple[float, ...]:
        """The noise levels; for an encoder 0 alone."""
        return self.probing.levels(self.path is None)

    @property
    def by(self) -> Protocol:
        """The protocol."""
        return find_protocol(self.probing.protocol)

    def grid(self, processes: Processes) -> Grid | None:
        """Compute all cells; the processes share the levels and draws, and only the first one returns the grid."""
        if processes.size > 1:
            self._check_same_images(processes)
        levels, draws = len(self.times), self.probing.draws
        probes = noise = None
        if self.by.classifies:
            unit = "level" if draws == 1 else "draw"
            # All draws of the first level, then all draws of the next.
            probes = self._compute("probes", unit, self._level, range(levels * draws), processes)
        if self.probing.noise_share_draws:
            noise = self._compute("noise share", "level", self._noise_share, range(levels), processes)
        if not processes.is_main:
            return None
        return self._build_grid(probes, noise)

    def _compute(
        self, title: str, unit: str, work: Callable[[int], Tensor], jobs: range, processes: Processes
    ) -> list[Tensor]:
        """Return `work` of all jobs and show the progress; the other processes return an empty list."""
        rows = []
        with track(title, len(jobs), unit, shown=processes.is_main) as progress:
            for row in self._rows(work, jobs, processes):
                rows.append(row)
                progress.update()
        return rows

    def _check_same_images(self, processes: Processes) -> None:
        """Raise a UserError on all processes if they have different images or options."""
        checksums = []
        for images in (self.data.train, self.data.test):
            compared, _ = images[subset(images, COMPARED, "compared")]
            checksums.append(zlib.crc32(compared.cpu().contiguous().numpy()))
        processes.check_same(f"images of {self.data.name}, or options", [self.protocol(), checksums])

    def _build_grid(
        self,
        probes: Sequence[Float64[Tensor, "scores layers"]] | None,
        noise: Sequence[Float64[Tensor, "3 layers"]] | None,
    ) -> Grid:
        """Return the means of the scores over the draws, and their standard deviations if there are several draws.

        Args:
            probes: scores of all levels and draws; None if there is no classifier.
            noise: noise share and variances of all levels; None if they were not measured.
        """
        draws = self.probing.draws
        mean = {}
        spread = {}
        if probes is not None:
            scores = torch.stack(probes).unflatten(0, (len(self.times), draws))
            suffix = OF_CLASS_TOKENS if has_class_token(self.net) else ""
            names = [name + suffix if name in RANKS else name for name in self.by.scores]
            mean |= zip(names, scores.mean(dim=1).unbind(1), strict=True)
            if draws > 1:
                spread |= zip(names, scores.std(dim=1).unbind(1), strict=True)
        if noise is not None:
            mean |= zip(NOISE_SCORES, torch.stack(noise).unbind(1), strict=True)
        layers = {i: self.net.layers[i] for i in self._chosen_layers()}
        return Grid(layers, self.times, mean, self.protocol(), spread, self.by.chosen_by)

    def _rows(self, work: Callable[[int], Tensor], jobs: range, processes: Processes) -> Iterator[Tensor]:
        """Yield `work` of the jobs, in order, on the first process.

        On a CPU, several jobs with small features are computed at once, on the cores that torch's threads leave idle.
        """
        threads = 1
        if self.device.type == "cpu" and processes.size == 1:
            room = SMALL // self._bytes(len(self._chosen_layers()))
            threads = min(len(jobs), free_threads(), room)
        if threads > 1:
            # The precision is a setting of all threads, so it is set here and not in each of them.
            with computing(self.device, self.precision):
                yield from in_threads(work, jobs, threads)
        else:
            yield from processes.map_ordered(jobs, work)

    def protocol(self) -> dict[str, Any]:
        """Return everything that the numbers depend on, except the weights, as plain values."""
        train, test = choose_images(self.probing, self.data)
        options = asdict(self.probing)
        for name in ("epochs", "noise_draws", "noise_images"):  # described below
            del options[name]
        about: dict[str, Any] = {"data": self.data.name}
        if self.by.classifies:
            about |= {"train": len(train), "test": len(test)}
        else:
            for name in CLASSIFYING:
                del options[name]
        about |= options
        about["times"] = list(self.times)
        if self.path is None:
            about["input"] = "clean images"
        else:
            about["label"] = "null"
            about["noise"] = self._describe_noise()
        if self.precision != "float32":
            about["precision"] = self.precision
        about |= self.by.about(self.probing)
        draws = self.probing.noise_share_draws
        if draws:
            coordinates = "tokens x channels, prefix tokens included"
            about["noise_share"] = {"images": len(self._noise_images()), "draws": draws, "coordinates": coordinates}
        if self.reference is not None:
            about["reference"] = dict(self.reference.about)
        return about

    def _describe_noise(self) -> str:
        """Return a description of the noise for reports."""
        if not self.by.classifies:
            return f"{self.probing.noise_share_draws} draws of {len(self._noise_images())} test images"
        noise = "new noise in every pass" if self.by.fresh else "one noise per image"
        if self.probing.draws > 1:
            noise += f", in {self.probing.draws} draws, averaged"
        return noise

    def _level(self, job: int) -> Tensor:
        """Return the scores of one draw of one noise level, (scores, layers), float64."""
        level, draw = divmod(job, self.probing.draws)
        layers = self._chosen_layers()
        at_once = max(1, FEATURES // self._bytes(1))  # layers whose features are held together
        parts = []
        for start in range(0, len(layers), at_once):
            cells = self.cells(level, draw, layers[start : start + at_once])
            values = self.by.judge(cells, self.probing).values
            parts.append(torch.stack([values[name].double() for name in self.by.scores]))
        return torch.cat(parts, dim=1)

    def _noise_images(self) -> list[int]:
        """Return the indices of the test images of the noise share, a fixed random choice."""
        return subset(self.data.test, self.probing.noise_images, "noise share")

    def _noise_share(self, level: int) -> Float64[Tensor, "3 layers"]:
        """Return NOISE_SCORES of one noise level."""
        return measure_noise_share(
            self._reader(),
            self.data.test,
            self._noise_images(),
            self._chosen_layers(),
            self.times[level],
            self.probing.seed,
            self.probing.noise_share_draws,
        )

    def cells(self, level: int, draw: int = 0, layers: Sequence[int] | None = None) -> Cells:
        """Return the features of one noise level and draw, with what a protocol needs to evaluate them.

        Args:
            level: index of the noise level.
            draw: number of the noise draw.
            layers: indices of the layers; None means all chosen layers.
        """
        layers = layers or self._chosen_layers()
        train, test = choose_images(self.probing, self.data)
        pool = self.probing.pool
        rank_pool = "cls" if has_class_token(self.net) else pool
        test_features, rank_features = self._features("test", level, layers, [pool, rank_pool], draw)

        def read_training_features(passed: int) -> Float[Tensor, "layers n d"]:
            return self._features("train", level, layers, [pool], draw, passed)[0]

        return Cells(
            read_training_features,
            self.data.train.labels[train],
            test_features,
            self.data.test.labels[test],
            len(self.data.class_names),
            self.device,
            rank_features,
            self.reference,
        )

    def _chosen_layers(self) -> list[int]:
        return layer_indices(self.net.layers, self.probing.layers)

    def _bytes(self, layers: int) -> int:
        """Return the bytes of the features of this number of layers."""
        train, test = choose_images(self.probing, self.data)
        return 4 * layers * (len(train) + len(test)) * self.net.dim

    def _features(
        self,
        split: Literal["train", "test"],
        level: int,
        layers: list[int],
        pools: Sequence[Pool],
        draw: int = 0,
        passed: int = 0,
    ) -> Float[Tensor, "pools layers n d"]:
        """Return features of the images of a split, float32 on the CPU.

        Draw 0 and pass 0 are left out of the key, so that their noise is unchanged from older versions.
        """
        train, test = choose_images(self.probing, self.data)
        images, chosen = self.data.train, train
        if split == "test":
            images, chosen = self.data.test, test
        key: list[str | int] = [self.probing.seed, split, level]
        if draw:
            key += ["draw", draw]
        if passed:
            key += ["pass", passed]
        return self._reader().read_pooled(
            images, chosen, layers, self.times[level], key=key, pools=pools, processes=Processes()
        )

    def _reader(self) -> TokenReader:
        return TokenReader(
            self.net, self.path, self.data.network_input, self.device, self.precision, self.probing.batch_size
        )
