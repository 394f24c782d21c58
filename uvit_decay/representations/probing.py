"""Probes of a network's features at every layer and noise level, and which images and networks can be probed.

The network is frozen. An image has one fixed noise for each level and draw, and for each pass of a protocol with fresh
noise. An encoder sees clean images, the single level t = 0. One forward pass over the images gives all layers of a
level, if they fit into FEATURES bytes. The classifiers of all layers are trained at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.encoders.networks import ProbedNetwork, final_norm
from uvit_decay.nn.intermediates import HasIntermediates, Pool, check_pool, has_class_token, layer_indices
from uvit_decay.representations.features import TokenReader, compute_rows
from uvit_decay.representations.grid import RANKS, Grid
from uvit_decay.representations.probe_options import NOISE_ALONE, Probing, ProtocolOptions
from uvit_decay.representations.probe_protocols import Cells, GridProtocol, Protocol, find_protocol
from uvit_decay.representations.reference import NEIGHBOURS, ReferenceFeatures
from uvit_decay.runs.history import OF_CLASS_TOKENS
from uvit_decay.runtime.distributed import COMPARED, Processes
from uvit_decay.runtime.precision import Precision
from uvit_decay.runtime.random import subset
from uvit_decay.terminal.errors import UserError

if TYPE_CHECKING:  # data are Lightning's
    from uvit_decay.data import ImageData
    from uvit_decay.data.batches import ImageSet


FEATURES = 2**31  # bytes of features in memory at once; below 4 GiB with the working memory of the probes


def open_probed_data(network: ProbedNetwork, data: str | None, test: str | None) -> ImageData:
    """Open the data on which a network's features are evaluated.

    Args:
        network: the network.
        data: name of the data as in `open_data`; None for the data that the network was trained on.
        test: path of test images; None for the data's own.
    """
    from uvit_decay.data.named import SETS, open_data

    if data is None and network.data not in SETS:
        if not network.data:
            raise UserError(f"{network.name} needs images: name them", argument="data")
        raise UserError(f"{network.name} was trained on {network.data}: name this data, or others", argument="data")
    net = network.net
    opened = open_data(data or network.data, test, net.image_size, net.channels, network.is_encoder)
    if data is None and network.fingerprint not in (None, opened.fingerprint):
        text = f"{network.name} was trained on other images called {network.data}: name these, or others"
        raise UserError(text, argument="data")
    if opened.test is None:
        raise UserError("there are no test images: name them, or set test_path of a configuration", argument="test")
    return opened


def choose_images(options: ProtocolOptions, data: ImageData) -> tuple[list[int], list[int]]:
    """Return the indices of the training images and of the test images to probe: fixed random choices."""
    train = subset(data.train, options.max_train, "probe train")
    test = subset(data.test, options.max_test, "probe test")
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


def check_data(data: ImageData, protocol: Protocol, options: ProtocolOptions) -> None:
    """Raise a UserError if there are not enough classes, or training images, for a protocol with a classifier."""
    if len(data.class_names) < 2:
        classes = f"{len(data.class_names)} classes"
        raise UserError(f"{data.name} has {classes}, probes need two or more: sort it into class folders")
    train, _ = choose_images(options, data)
    counts = data.train.labels[train].bincount(minlength=len(data.class_names)).tolist()
    for count, name in zip(counts, data.class_names, strict=True):
        if count < protocol.shots:
            raise UserError(f"{protocol.shots} training images of each class are needed, {name} has {count}")


def check_same_images(data: ImageData, options: Mapping[str, Any], processes: Processes) -> None:
    """Raise a UserError on all processes if they have different images or options."""
    checksums = []
    for images in (data.train, data.test):
        compared, _ = images[subset(images, COMPARED, "compared")]
        checksums.append(zlib.crc32(compared.cpu().contiguous().numpy()))
    processes.check_same(f"images of {data.name}, or options", [options, checksums])


def check_probed(net: object, path: NoisePath | None, data: ImageData, probing: Probing) -> None:
    """Raise a UserError if the network cannot be probed on this data.

    Args:
        net: the network.
        path: noise path of a denoiser's input; None for an encoder.
        data: training and test images.
        probing: the options of the probes.
    """
    check_network(net, path)
    layer_indices(net.layers, probing.layers)
    if probing.draws_of_noise and path is None:
        raise UserError("this network is an encoder and sees images without noise: it has no noise share; leave it out")
    if probing.protocol == NOISE_ALONE:
        return
    protocol = find_protocol(probing.protocol, GridProtocol)
    if path is None:
        protocol.check_encoder(probing)
    check_pool(net, probing.pool)
    check_data(data, protocol, probing)
    fewest = NEIGHBOURS + 2
    if protocol.needs_reference and min(len(data.test), probing.max_test) < fewest:
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
        norm: apply the network's final layer norm before pooling.
    """

    net: HasIntermediates
    path: NoisePath | None
    data: ImageData
    probing: Probing
    device: torch.device
    precision: Precision = "float32"
    reference: ReferenceFeatures | None = None
    norm: bool = False

    @property
    def times(self) -> tuple[float, ...]:
        """The noise levels; for an encoder 0 alone."""
        return self.probing.levels(self.path is None)

    @property
    def protocol(self) -> GridProtocol:
        """The protocol."""
        return find_protocol(self.probing.protocol, GridProtocol)

    def grid(self, processes: Processes) -> Grid | None:
        """Compute all grid points; the processes share levels and draws, and only the first one returns the grid."""
        if processes.size > 1:
            check_same_images(self.data, self.describe(), processes)
        draws = self.probing.draws
        jobs = range(len(self.times) * draws)  # all draws of the first level, then all draws of the next
        unit = "level" if draws == 1 else "draw"
        size = self._bytes(len(self._chosen_layers()))
        rows = compute_rows("probes", unit, self._level, jobs, self.device, self.precision, processes, size)
        if not processes.is_main:
            return None
        return self._build_grid(rows)

    def _build_grid(self, rows: Sequence[Float64[Tensor, "scores layers"]]) -> Grid:
        """Return the means of the scores over the draws, and their standard deviations if there are several draws."""
        draws = self.probing.draws
        scores = torch.stack(rows).unflatten(0, (len(self.times), draws))
        suffix = OF_CLASS_TOKENS if has_class_token(self.net) else ""
        names = [name + suffix if name in RANKS else name for name in self.protocol.scores]
        mean = dict(zip(names, scores.mean(dim=1).unbind(1), strict=True))
        spread = {}
        if draws > 1:
            spread = dict(zip(names, scores.std(dim=1).unbind(1), strict=True))
        layers = {i: self.net.layers[i] for i in self._chosen_layers()}
        return Grid(layers, self.times, mean, self.describe(), spread, self.protocol.chosen_by)

    def describe(self) -> dict[str, Any]:
        """Return everything that the numbers depend on, except the weights, as plain values."""
        train, test = choose_images(self.probing, self.data)
        options = asdict(self.probing)
        for name in ("epochs", "noise_draws", "noise_images"):  # described below
            del options[name]
        about: dict[str, Any] = {"data": self.data.name, "train": len(train), "test": len(test), **options}
        about["times"] = list(self.times)
        if self.path is None:
            about["input"] = "clean images"
        else:
            about["label"] = "null"
            about["noise"] = "new noise in every pass" if self.protocol.fresh else "one noise per image"
            if self.probing.draws > 1:
                about["noise"] += f", in {self.probing.draws} draws, averaged"
        if self.precision != "float32":
            about["precision"] = self.precision
        about |= self.protocol.about(self.probing)
        if self.reference is not None:
            about["reference"] = dict(self.reference.about)
        return about

    def _level(self, job: int) -> Tensor:
        """Return the scores of one draw of one noise level, (scores, layers), float64."""
        level, draw = divmod(job, self.probing.draws)
        layers = self._chosen_layers()
        at_once = max(1, FEATURES // self._bytes(1))  # layers whose features are held together
        parts = []
        for start in range(0, len(layers), at_once):
            cells = self.cells(level, draw, layers[start : start + at_once])
            values = self.protocol.evaluate(cells, self.probing).values
            parts.append(torch.stack([values[name].double() for name in self.protocol.scores]))
        return torch.cat(parts, dim=1)

    def cells(self, level: int, draw: int = 0, layers: Sequence[int] | None = None) -> Cells:
        """Return the features of one noise level and draw, with what a protocol needs to evaluate them.

        Args:
            level: index of the noise level.
            draw: number of the noise draw.
            layers: indices of the layers; None means all chosen layers.
        """
        layers = layers or self._chosen_layers()
        pool = self.probing.pool
        rank_pool = "cls" if has_class_token(self.net) else pool
        test, ranked = self._features("test", level, layers, [pool, rank_pool], draw)

        def read_training_features(passed: int) -> Float[Tensor, "layers n d"]:
            return self._features("train", level, layers, [pool], draw, passed)[0]

        return Cells(
            read_training_features,
            self._labels("train"),
            test,
            self._labels("test"),
            len(self.data.class_names),
            self.device,
            ranked,
            self.reference,
        )

    def stored_cells(self, pools: Sequence[Pool], processes: Processes) -> dict[Pool, Cells]:
        """Return the features of the first noise level by pool, on the device, read in one pass over the images.

        The processes share the images. Only the first one returns features, the others an empty dict.
        """
        layers = self._chosen_layers()
        train = self._features("train", 0, layers, pools, processes=processes, title="train images")
        test = self._features("test", 0, layers, pools, processes=processes, title="test images")
        if not processes.is_main:
            return {}
        train = train.to(self.device)
        test = test.to(self.device)
        train_labels = self._labels("train").to(self.device)
        test_labels = self._labels("test").to(self.device)
        classes = len(self.data.class_names)
        cells: dict[Pool, Cells] = {}
        for k, pool in enumerate(pools):
            cells[pool] = Cells(lambda _, k=k: train[k], train_labels, test[k], test_labels, classes, self.device)
        return cells

    def _images(self, split: Literal["train", "test"]) -> tuple[ImageSet, list[int]]:
        """Return the images of a split and the indices of the probed ones."""
        train, test = choose_images(self.probing, self.data)
        if split == "train":
            return self.data.train, train
        return self.data.test, test

    def _labels(self, split: Literal["train", "test"]) -> Int64[Tensor, " n"]:
        images, chosen = self._images(split)
        return images.labels[chosen]

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
        processes: Processes | None = None,
        title: str | None = None,
    ) -> Float[Tensor, "pools layers n d"]:
        """Return features of the images of a split, float32 on the CPU.

        Draw 0 and pass 0 are left out of the key, so that their noise is unchanged from older versions. If `processes`
        share the images, only the first one gets features.
        """
        images, chosen = self._images(split)
        key: list[str | int] = [self.probing.seed, split, level]
        if draw:
            key += ["draw", draw]
        if passed:
            key += ["pass", passed]
        reader = TokenReader(
            self.net, self.path, self.data.network_input, self.device, self.precision, self.probing.batch_size
        )
        return reader.read_pooled(
            images,
            chosen,
            layers,
            self.times[level],
            key=key,
            pools=pools,
            processes=processes or Processes(),
            norm=final_norm(self.net) if self.norm else None,
            title=title,
        )
