"""Probes of a network's features at every layer and noise level, by the protocols of `protocols`.

The network is frozen. An image has one fixed noise for each level and draw, and for each pass of a protocol with fresh
noise; an encoder sees clean images, the single level t = 0. One forward pass over the images gives all layers of a
level (if they fit, see FEATURES); the classifiers of all layers are trained at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.nn.intermediates import HasIntermediates, Pool, check_pool, has_class_token, layer_indices
from uvit_decay.representations.features import TokenReader
from uvit_decay.representations.grid import OF_CLASS_TOKENS, RANKS, Grid
from uvit_decay.representations.options import Classification, Probing
from uvit_decay.representations.protocols import PROTOCOLS, Cells, Protocol
from uvit_decay.representations.reference import NEIGHBOURS, Reference
from uvit_decay.runtime.concurrency import free_threads, in_threads
from uvit_decay.runtime.distributed import COMPARED, Processes
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.precision import Precision, computing
from uvit_decay.runtime.program import localised
from uvit_decay.runtime.random import subset

if TYPE_CHECKING:  # data are Lightning's
    from uvit_decay.data import ImageData

FEATURES = 2**31  # bytes of features held at once; below 4 GiB with the working memory of the probes
SMALL = 2**28  # bytes of features of levels that are computed at the same time on a CPU


def probed_images(probing: Probing | Classification, data: ImageData) -> tuple[list[int], list[int]]:
    """Return the indices of the training and of the test images that are probed, fixed random choices."""
    return subset(data.train, probing.max_train, "probe train"), subset(data.test, probing.max_test, "probe test")


def default_layer(net: HasIntermediates, path: NoisePath | None) -> int:
    """Return the layer that is judged by default: U-ViT's middle block, SiT's last encoder block, an encoder's last."""
    return len(net.layers) - 1 if path is None else len(net.layers) // 2


def check_network(net: object, path: NoisePath | None) -> None:
    """Raise a UserError if the network has no features, or is a denoiser that has none without a label."""
    if not isinstance(net, HasIntermediates):
        raise UserError(f"{type(net).__name__} has no layers to probe: remove LinearProbes from the callbacks")
    if path is not None and net.num_classes and not net.null_label:
        mend = "set null_label to true, or remove LinearProbes from the callbacks"
        raise UserError(f"features are read under the null label, which this network was trained without: {mend}")


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
    protocol = PROTOCOLS[probing.protocol]
    protocol.check(data.train.labels[probed_images(probing, data)[0]], data.class_names, probing)
    if protocol.aligned and min(len(data.test), probing.max_test) < NEIGHBOURS + 2:
        raise UserError(f"an alignment by {NEIGHBOURS} nearest neighbours needs {NEIGHBOURS + 2} test images or more")


@dataclass(frozen=True)
class Prober:
    """A network with the noise path of its input, the data to probe it on, and the precision of its features.

    An encoder has no noise path: None means that it sees clean images. A protocol that aligns needs a `reference`, the
    features of another network.
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
        """The noise levels; an encoder has one, 0."""
        return self.probing.levels(self.path is None)

    @property
    def by(self) -> Protocol:
        """The protocol."""
        return PROTOCOLS[self.probing.protocol]

    def grid(self, processes: Processes, show: bool = False) -> Grid | None:
        """Compute all cells, with levels and draws shared among the processes; return None on all but the first."""
        draws = self.probing.draws
        jobs = range(len(self.times) * draws)  # the draws of the first level, then those of the next
        if processes.size > 1:
            few = [images[subset(images, COMPARED, "compared")][0] for images in (self.data.train, self.data.test)]
            content = [zlib.crc32(images.cpu().contiguous().numpy()) for images in few]
            processes.check_same(f"images of {self.data.name}, or options", [self.protocol(), content])
        rows = []
        unit = "level" if draws == 1 else "draw"
        with tqdm(total=len(jobs), unit=unit, desc="probes", disable=not (show and processes.is_main)) as bar:
            for row in self._rows(jobs, processes):
                rows.append(row)
                bar.update()
        if not processes.is_main:
            return None
        layers = {i: self.net.layers[i] for i in self._chosen_layers()}
        found = torch.stack(rows).unflatten(0, (len(self.times), draws))  # (levels, draws, scores, layers)
        ending = OF_CLASS_TOKENS if has_class_token(self.net) else ""
        names = [f"{name}{ending}" if name in RANKS else name for name in self.by.scores]
        sides = found.mean(dim=1), found.std(dim=1, correction=min(1, draws - 1))  # the deviation of one draw is 0
        mean, spread = (dict(zip(names, side.unbind(1), strict=True)) for side in sides)
        return Grid(layers, self.times, mean, self.protocol(), spread if draws > 1 else {}, self.by.chosen_by)

    def _rows(self, jobs: range, processes: Processes) -> Iterator[Tensor]:
        """Yield the scores of the jobs on the first process; on a CPU idle cores compute others that are small."""
        room = SMALL // self._bytes(len(self._chosen_layers()))
        threads = min(len(jobs), free_threads(), room) if self.device.type == "cpu" and processes.size == 1 else 1
        if threads > 1:
            with computing(self.device, self.precision):  # a setting of all threads, which `_features` then leaves
                yield from in_threads(self._level, jobs, threads)
        else:
            yield from processes.map_ordered(jobs, self._level)

    def protocol(self) -> dict[str, Any]:
        """Return everything that the numbers depend on, except the weights, as plain values."""
        train, test = probed_images(self.probing, self.data)
        noise = "new noise in every pass" if self.by.fresh else "one noise an image"
        if self.probing.draws > 1:
            noise += f", in {self.probing.draws} draws, averaged"
        options = asdict(self.probing)
        del options["epochs"]  # the protocol has more to say
        return {
            "data": self.data.name,
            "train": len(train),
            "test": len(test),
            **options,
            "times": list(self.times),
            **({"input": "clean images"} if self.path is None else {"label": "null", "noise": noise}),
            **({} if self.precision == "float32" else {"precision": self.precision}),
            **self.by.about(self.probing),
            **({} if self.reference is None else {"reference": dict(self.reference.about)}),
        }

    def _level(self, job: int) -> Tensor:
        """Return the scores of one draw of one noise level, (scores, layers), float64."""
        level, draw = divmod(job, self.probing.draws)
        layers, size = self._chosen_layers(), max(1, FEATURES // self._bytes(1))  # whose features are held together
        groups = [layers[i : i + size] for i in range(0, len(layers), size)]
        judged = [self.by.judge(self.cells(level, draw, group), self.probing).values for group in groups]
        return torch.stack([torch.cat([values[name].double() for values in judged]) for name in self.by.scores])

    def cells(self, level: int, draw: int = 0, layers: Sequence[int] | None = None) -> Cells:
        """Return the features of layers, None for all that are probed, at the noise level of this index, in a draw."""
        layers = layers or self._chosen_layers()
        train, test = probed_images(self.probing, self.data)
        pools = [self.probing.pool, "cls" if has_class_token(self.net) else self.probing.pool]
        of_test, ranked = self._features("test", level, layers, pools, draw)
        return Cells(
            lambda passed: self._features("train", level, layers, pools[:1], draw, passed)[0],
            self.data.train.labels[train],
            of_test,
            self.data.test.labels[test],
            len(self.data.class_names),
            self.device,
            ranked,
            self.reference,
        )

    def _chosen_layers(self) -> list[int]:
        return layer_indices(self.net.layers, self.probing.layers)

    def _bytes(self, layers: int) -> int:
        """Return the bytes of the features of so many layers."""
        return 4 * layers * sum(map(len, probed_images(self.probing, self.data))) * self.net.dim

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

        The noise of the first draw in the first pass has the key that it had before there were draws and passes.
        """
        images, chosen = getattr(self.data, split), probed_images(self.probing, self.data)[split == "test"]
        key = (
            self.probing.seed,
            split,
            level,
            *(("draw", draw) if draw else ()),
            *(("pass", passed) if passed else ()),
        )
        inputs = self.data.network_input, self.device, self.precision, self.probing.batch_size
        where = images, chosen, layers, self.times[level]
        return TokenReader(self.net, self.path, *inputs).pooled(*where, *key, pools=pools, processes=Processes())
