"""Classification protocols of `evaluate.py classify`: checks before the work, one extraction, a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from uvit_decay.nn.intermediates import Pool, check_pool, layer_indices
from uvit_decay.representations.features import TokenReader, final_norm
from uvit_decay.representations.networks import ProbedNetwork
from uvit_decay.representations.options import Classification, choose_level
from uvit_decay.representations.probing import check_labelled, check_network, choose_images, default_layer
from uvit_decay.representations.protocols import Cells, find_protocol
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.precision import Precision
from uvit_decay.runtime.progress import track

if TYPE_CHECKING:  # data are Lightning's
    from uvit_decay.data import ImageData


@dataclass(frozen=True)
class Classifying:
    """Evaluation of a network's features on labelled data by classification protocols.

    Args:
        judged: the network.
        data: training and test images.
        options: the protocols and their settings.

    Raises:
        UserError: the options or protocols need something that the network or the data does not have.
    """

    judged: ProbedNetwork
    data: ImageData
    options: Classification

    def __post_init__(self) -> None:
        check_network(self.judged.net, self.judged.path)
        check_labelled(self.data)
        _ = self.layer  # these two raise UserErrors
        _ = self.time
        if self.options.norm and final_norm(self.judged.net) is None:
            network = type(self.judged.net).__name__
            raise UserError(f"--norm: this {network} has no final layer norm; leave it out")
        labels = self.data.train.labels[self.chosen[0]]
        for name, pool in self.pools.items():
            check_pool(self.judged.net, pool)
            find_protocol(name, of_grid=False).check(labels, self.data.class_names, self.options)

    @property
    def layer(self) -> int:
        """Number of the layer whose tokens are pooled."""
        if self.options.layer is None:
            return default_layer(self.judged.net, self.judged.path)
        return layer_indices(self.judged.net.layers, (self.options.layer,))[0]

    @property
    def time(self) -> float:
        """Noise level of a denoiser's images, 0 for an encoder."""
        return choose_level(self.options.time, self.judged.is_encoder)

    @property
    def pools(self) -> dict[str, Pool]:
        """Pool of each protocol, by the protocol's name."""
        pools: dict[str, Pool] = {}
        for name in self.options.protocol:
            pools[name] = self.options.pool or find_protocol(name, of_grid=False).pool
        return pools

    @property
    def chosen(self) -> tuple[list[int], list[int]]:
        """Indices of the training and of the test images, fixed random choices."""
        return choose_images(self.options, self.data)

    def report(self, device: torch.device, precision: Precision, processes: Processes) -> dict[str, Any] | None:
        """Compute all protocols; return values and all choices as plain values, on the other processes None."""
        cells = self.cells(device, precision, processes)
        if not processes.is_main:
            return None
        results = {}
        for name, pool in self.pools.items():
            with track(name):
                outcome = find_protocol(name, of_grid=False).judge(cells[pool], self.options)
            values = {key: float(value[0]) for key, value in outcome.values.items()}
            results[name] = {"values": values, "chosen": {"pool": pool, **outcome.chosen}}
        return {"network": self.judged.about, "features": self._describe_features(precision), "protocols": results}

    def _describe_features(self, precision: Precision) -> dict[str, Any]:
        """Return everything that the features depend on except the weights, as plain values."""
        from uvit_decay.evaluation.open_by_name import describe_pictures, describe_test_images

        train, test = self.chosen
        images = "clean images"
        if not self.judged.is_encoder:
            images = f"noise level {self.time:g}, null label"
        return {
            "data": self.data.name,
            "train": len(train),
            "test": len(test),
            "classes": len(self.data.class_names),
            "pictures": describe_pictures(self.data),
            "test images": describe_test_images(self.data),
            "layer": self.layer,
            "name": self.judged.net.layers[self.layer].name,
            "norm": "the network's final layer norm" if self.options.norm else "none",
            "input": images,
            "precision": precision,
        }

    def cells(self, device: torch.device, precision: Precision, processes: Processes) -> dict[Pool, Cells]:
        """Return the features for each pool, on the device, of one pass over the images.

        The other processes return an empty dict.
        """
        net = self.judged.net.to(device)
        reader = TokenReader(net, self.judged.path, self.data.network_input, device, precision, self.options.batch_size)
        train_images, test_images = self.chosen
        pools = sorted(set(self.pools.values()))
        train = self._read_features(reader, "train", train_images, pools, processes)
        test = self._read_features(reader, "test", test_images, pools, processes)
        if not processes.is_main:
            return {}
        train = train.to(device)
        labels = self.data.train.labels[train_images].to(device)
        test = test.to(device)
        test_labels = self.data.test.labels[test_images].to(device)
        cells: dict[Pool, Cells] = {}
        for k, pool in enumerate(pools):
            cells[pool] = Cells(
                lambda _, k=k: train[k], labels, test[k], test_labels, len(self.data.class_names), device
            )
        return cells

    def _read_features(
        self,
        reader: TokenReader,
        split: Literal["train", "test"],
        chosen: list[int],
        pools: list[Pool],
        processes: Processes,
    ) -> Float[Tensor, "pools layers n d"]:
        """Return the features of the chosen images of a split on the CPU; on the other processes without values."""
        return reader.read_pooled(
            self.data.train if split == "train" else self.data.test,
            chosen,
            [self.layer],
            self.time,
            key=(self.options.seed, split, 0),
            pools=pools,
            processes=processes,
            norm=final_norm(reader.net) if self.options.norm else None,
            title=f"{split} images",
        )


def format_report(report: Mapping[str, Any]) -> str:
    """Return a report as text: the network and its features, then a paragraph for each protocol."""
    about = {**report["network"], **report["features"]}
    lines = [f"{name}: {value}" for name, value in about.items()]
    for name, result in report["protocols"].items():
        values = [f"{_format_name(key)} {100 * value:.2f} %" for key, value in result["values"].items()]
        chosen = [f"{_format_name(key)} {_format_choice(value)}" for key, value in result["chosen"].items()]
        lines += ["", f"{name}: {', '.join(values)}", f"  {'; '.join(chosen)}"]
    return "\n".join(lines)


def _format_name(key: str) -> str:
    return key.replace("_", " ")


def _format_choice(value: Any) -> str:
    """Return a setting of a protocol as text, floats with four digits."""
    if isinstance(value, list):
        return ", ".join(map(_format_choice, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
