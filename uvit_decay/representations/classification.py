"""Classification protocols of `evaluate.py classify`: checks before the work, one extraction, a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from uvit_decay.encoders.networks import ProbedNetwork, final_norm
from uvit_decay.nn.intermediates import Pool, check_pool, layer_indices
from uvit_decay.representations.probe_options import TIME, Classification, Probing
from uvit_decay.representations.probe_protocols import PointProtocol, find_protocol
from uvit_decay.representations.probing import Prober, check_data, check_network, choose_images, default_layer
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.precision import Precision
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.progress import track

if TYPE_CHECKING:  # data are Lightning's
    from uvit_decay.data import ImageData


@dataclass(frozen=True)
class Classifying:
    """Evaluation of one layer of a network at one noise level by classification protocols.

    Args:
        network: the network.
        data: training and test images.
        options: the protocols and their settings.
    """

    network: ProbedNetwork
    data: ImageData
    options: Classification

    def __post_init__(self) -> None:
        net = self.network.net
        check_network(net, self.network.path)
        if self.network.is_encoder and self.options.time is not None:
            raise UserError("this network is an encoder and sees clean images; leave it out", argument="time")
        for name, protocol in self.protocols.items():
            check_pool(net, self.pools[name])
            check_data(self.data, protocol, self.options)
        _ = self.layer  # raises a UserError
        if self.options.norm and final_norm(net) is None:
            raise UserError(f"this {type(net).__name__} has no final layer norm; leave it out", argument="norm")

    @property
    def protocols(self) -> dict[str, PointProtocol]:
        """The protocols by name."""
        return {name: find_protocol(name, PointProtocol) for name in self.options.protocol}

    @property
    def pools(self) -> dict[str, Pool]:
        """Pool of each protocol, by the protocol's name."""
        return {name: self.options.pool or protocol.pool for name, protocol in self.protocols.items()}

    @property
    def layer(self) -> int:
        """Number of the layer whose tokens are pooled."""
        if self.options.layer is None:
            return default_layer(self.network.net, self.network.path)
        return layer_indices(self.network.net.layers, (self.options.layer,))[0]

    def prober(self, device: torch.device, precision: Precision) -> Prober:
        """Return the prober of the layer and the noise level.

        Args:
            device: device of the network, to which it is moved, and of the features.
            precision: precision of the network.
        """
        options = self.options
        probing = Probing(
            times=None if self.network.is_encoder else (options.time or TIME,),
            layers=(str(self.layer),),
            max_train=options.max_train,
            max_test=options.max_test,
            seed=options.seed,
            batch_size=options.batch_size,
        )
        net = self.network.net.to(device)
        return Prober(net, self.network.path, self.data, probing, device, precision, norm=options.norm)

    def report(self, device: torch.device, precision: Precision, processes: Processes) -> dict[str, Any] | None:
        """Compute all protocols; return values and all choices as plain values, on the other processes None."""
        prober = self.prober(device, precision)
        cells = prober.stored_cells(sorted(set(self.pools.values())), processes)
        if not processes.is_main:
            return None
        results = {}
        for name, protocol in self.protocols.items():
            pool = self.pools[name]
            with track(name):
                outcome = protocol.evaluate(cells[pool], self.options)
            values = {key: float(value[0]) for key, value in outcome.values.items()}
            results[name] = {"values": values, "chosen": {"pool": pool, **outcome.chosen}}
        return {"network": self.network.about, "features": self._describe_features(prober), "protocols": results}

    def _describe_features(self, prober: Prober) -> dict[str, Any]:
        """Return everything that the features depend on except the weights, as plain values."""
        from uvit_decay.data.named import describe_data

        train, test = choose_images(self.options, self.data)
        images = "clean images"
        if not self.network.is_encoder:
            images = f"noise level {prober.times[0]:g}, null label"
        return {
            "data": self.data.name,
            "train": len(train),
            "test": len(test),
            "classes": len(self.data.class_names),
            **describe_data(self.data, self.network.fingerprint),
            "layer": self.layer,
            "name": self.network.net.layers[self.layer].name,
            "norm": "the network's final layer norm" if self.options.norm else "none",
            "input": images,
            "precision": prober.precision,
        }


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
