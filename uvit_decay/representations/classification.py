"""The classification protocols of `evaluate.py classify`: checks before the work, one extraction, a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from uvit_decay.nn.intermediates import Pool, check_pool, layer_indices
from uvit_decay.representations.features import TokenReader, final_norm
from uvit_decay.representations.networks import ProbedNetwork
from uvit_decay.representations.options import Classification, chosen_level
from uvit_decay.representations.probing import check_labelled, check_network, default_layer, probed_images
from uvit_decay.representations.protocols import Cells, find_protocol
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.precision import Precision

if TYPE_CHECKING:  # data are Lightning's
    from uvit_decay.data import ImageData


@dataclass(frozen=True)
class Classifying:
    """A network, labelled data, and what to judge it by.

    Args:
        judged: the network.
        data: training and test images.
        options: the protocols and their settings.

    Raises:
        UserError: something is asked that the network or the data do not have.
    """

    judged: ProbedNetwork
    data: ImageData
    options: Classification

    def __post_init__(self) -> None:
        check_network(self.judged.net, self.judged.path)
        check_labelled(self.data)
        _ = self.layer, self.time
        if self.options.norm and final_norm(self.judged.net) is None:
            raise UserError(f"--norm: this {type(self.judged.net).__name__} has no final layer norm")
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
        return chosen_level(self.options.time, self.judged.is_encoder)

    @property
    def pools(self) -> dict[str, Pool]:
        """Return the pool of each protocol."""
        return {name: self.options.pool or find_protocol(name, of_grid=False).pool for name in self.options.protocol}

    @property
    def chosen(self) -> tuple[list[int], list[int]]:
        """Indices of the training and of the test images, fixed random choices."""
        return probed_images(self.options, self.data)

    def report(self, device: torch.device, precision: Precision, processes: Processes) -> dict[str, Any] | None:
        """Compute all protocols; return values and all choices as plain values, None but on the first rank."""
        from uvit_decay.evaluation.open_by_name import judged_on, picture_protocol

        cells = self.cells(device, precision, processes)
        if not processes.is_main:
            return None
        results = {}
        for name, pool in self.pools.items():
            outcome = find_protocol(name, of_grid=False).judge(cells[pool], self.options)
            values = {key: float(value[0]) for key, value in outcome.values.items()}
            results[name] = {"values": values, "chosen": {"pool": pool, **outcome.chosen}}
        train, test = self.chosen
        features = {
            "data": self.data.name,
            "train": len(train),
            "test": len(test),
            "classes": len(self.data.class_names),
            "pictures": picture_protocol(self.data),
            "test images": judged_on(self.data),
            "layer": self.layer,
            "name": self.judged.net.layers[self.layer].name,
            "norm": "the network's final layer norm" if self.options.norm else "none",
            "input": "clean images" if self.judged.is_encoder else f"noise level {self.time:g}, null label",
            "precision": precision,
        }
        return {"network": self.judged.about, "features": features, "protocols": results}

    def cells(self, device: torch.device, precision: Precision, processes: Processes) -> dict[Pool, Cells]:
        """Return the features for each pool, on the device, of one pass over the images; none but on the first rank."""
        net, pools = self.judged.net.to(device), sorted(set(self.pools.values()))
        inputs = self.data.network_input, device, precision, self.options.batch_size
        reader = TokenReader(net, self.judged.path, *inputs)
        norm, sides = final_norm(net) if self.options.norm else None, []
        for split, chosen in zip(("train", "test"), self.chosen, strict=True):
            images = getattr(self.data, split)
            where = images, chosen, [self.layer], self.time, self.options.seed, split, 0
            found = reader.pooled(*where, pools=pools, norm=norm, processes=processes, title=f"{split} images")
            if processes.is_main:
                sides += found.to(device), images.labels[chosen].to(device)
        if not processes.is_main:
            return {}
        (train, labels, test, test_labels), classes = sides, len(self.data.class_names)
        return {
            pool: Cells(lambda _, k=k: train[k], labels, test[k], test_labels, classes, device)
            for k, pool in enumerate(pools)
        }


def table(report: Mapping[str, Any]) -> str:
    """Return a report as text: the network and its features, then a paragraph for each protocol."""
    lines = [f"{name}: {value}" for name, value in {**report["network"], **report["features"]}.items()]
    for name, result in report["protocols"].items():
        values = ", ".join(f"{key.replace('_', ' ')} {100 * value:.2f} %" for key, value in result["values"].items())
        chosen = (f"{key.replace('_', ' ')} {_short(value)}" for key, value in result["chosen"].items())
        lines += ["", f"{name}: {values}", f"  {'; '.join(chosen)}"]
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
