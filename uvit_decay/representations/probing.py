"""Probes of a network's features at every layer and noise level, by the protocols of `protocols`.

The network is frozen. An image has one fixed noise for each level and draw, and for each pass of a protocol with fresh
noise. An encoder sees clean images, the single level t = 0. One forward pass over the images gives all layers of a
level, if they fit into FEATURES bytes. The classifiers of all layers are trained at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.encoders.networks import final_norm
from uvit_decay.nn.intermediates import HasIntermediates, Pool, has_class_token, layer_indices
from uvit_decay.representations.checks import check_same_images, choose_images
from uvit_decay.representations.features import TokenReader, compute_rows
from uvit_decay.representations.grid import RANKS, Grid
from uvit_decay.representations.options import Probing
from uvit_decay.representations.protocols import GridProtocol, find_protocol
from uvit_decay.representations.recipes import Cells
from uvit_decay.representations.reference import Reference
from uvit_decay.runs.history import OF_CLASS_TOKENS
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.precision import Precision

if TYPE_CHECKING:  # data are Lightning's
    from uvit_decay.data import ImageData
    from uvit_decay.data.batches import ImageSet

FEATURES = 2**31  # bytes of features in memory at once; below 4 GiB with the working memory of the probes


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

    Raises:
        UserError: the options do not fit the protocol or the network.
    """

    net: HasIntermediates
    path: NoisePath | None
    data: ImageData
    probing: Probing
    device: torch.device
    precision: Precision = "float32"
    reference: Reference | None = None
    norm: bool = False

    def __post_init__(self) -> None:
        self.protocol.check(self.probing, is_encoder=self.path is None)

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
        return self._build_grid(rows) if processes.is_main else None

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
        return self._reader().read_pooled(
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

    def _reader(self) -> TokenReader:
        to_input = self.data.network_input
        return TokenReader(self.net, self.path, to_input, self.device, self.precision, self.probing.batch_size)
