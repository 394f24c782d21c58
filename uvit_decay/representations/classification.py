"""The classification protocols of `evaluate.py classify`: checks before the work, one extraction, a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from uvit_decay.nn.intermediates import HasIntermediates, Pool, check_pool, layer_indices, pooled, states_of
from uvit_decay.representations.linear_probes import Features
from uvit_decay.representations.options import Classification, ProtocolName, chosen_level
from uvit_decay.representations.probing import check_labelled, check_network, network_inputs, probed_images, usual_layer
from uvit_decay.representations.protocols import PROTOCOLS
from uvit_decay.runtime.concurrency import read_ahead
from uvit_decay.runtime.distributed import Processes, batches
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.precision import Precision, computing

if TYPE_CHECKING:  # other rooms are known by their interfaces alone
    from uvit_decay.data import ImageData
    from uvit_decay.data.batches import ImageSet
    from uvit_decay.diffusion.noise_path import NoisePath
    from uvit_decay.representations.networks import Judged


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

    judged: Judged
    data: ImageData
    options: Classification

    def __post_init__(self) -> None:
        check_network(self.judged.net, self.judged.path)
        check_labelled(self.data)
        _ = self.layer, self.time
        if self.options.norm:
            final_norm(self.judged.net)
        labels = self.data.train.labels[self.chosen[0]]
        for name, pool in self.pools.items():
            check_pool(self.judged.net, pool)
            PROTOCOLS[name].check(labels, self.data.class_names, self.options)

    @property
    def layer(self) -> int:
        """Number of the layer whose tokens are pooled."""
        if self.options.layer is None:
            return usual_layer(self.judged.net, self.judged.path)
        return layer_indices(self.judged.net.layers, (self.options.layer,))[0]

    @property
    def time(self) -> float:
        """Noise level of a denoiser's images, 0 for an encoder."""
        return chosen_level(self.options.time, self.judged.is_encoder)

    @property
    def pools(self) -> dict[ProtocolName, Pool]:
        """Return the pool of each protocol."""
        return {name: self.options.pool or PROTOCOLS[name].pool for name in self.options.protocol}

    @property
    def chosen(self) -> tuple[list[int], list[int]]:
        """Indices of the training and of the test images, fixed random choices."""
        return probed_images(self.options, self.data)

    def report(self, device: torch.device, precision: Precision, processes: Processes) -> dict[str, Any] | None:
        """Compute all protocols; return values and all choices as plain values, None but on the first rank."""
        net, options = self.judged.net.to(device), self.options
        settings = (device, precision, options.seed, options.batch_size)
        extraction = Extraction(net, self.judged.path, self.layer, self.time, options.norm, *settings)
        pools = sorted(set(self.pools.values()))
        features = extraction.features(self.data, self.chosen, pools, processes)
        if features is None:
            return None
        results = {}
        for name, pool in self.pools.items():
            outcome = PROTOCOLS[name].judge(features[pool], options)
            results[name] = {"values": dict(outcome.values), "chosen": {"pool": pool, **outcome.chosen}}
        return {"network": self.judged.about, "features": self._about(precision), "protocols": results}

    def _about(self, precision: Precision) -> dict[str, Any]:
        """Return what all protocols have in common, as plain values."""
        from uvit_decay.evaluation.open_by_name import picture_protocol

        train, test = self.chosen
        return {
            "data": self.data.name,
            "train": len(train),
            "test": len(test),
            "classes": len(self.data.class_names),
            "pictures": picture_protocol(self.data),
            "layer": self.layer,
            "name": self.judged.net.layers[self.layer].name,
            "norm": "the network's final layer norm" if self.options.norm else "none",
            "input": "clean images" if self.judged.is_encoder else f"noise level {self.time:g}, null label",
            "precision": precision,
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


@dataclass(frozen=True)
class Extraction:
    """The tokens of one layer of a network, pooled in several ways in one pass over the images.

    Args:
        net: the network, in eval mode, on `device`.
        path: noise path of a denoiser's input, which gets the null label; None for an encoder, which sees clean images.
        layer: number of the layer; later ones never run.
        time: noise level; 0 for an encoder.
        norm: apply the network's final layer norm to the tokens before they are pooled.
        device: device of the network.
        precision: of the network.
        seed: seed of the noise.
        batch_size: images at a time on each device.
    """

    net: HasIntermediates
    path: NoisePath | None
    layer: int
    time: float
    norm: bool
    device: torch.device
    precision: Precision
    seed: int
    batch_size: int

    def features(
        self, data: ImageData, chosen: tuple[list[int], list[int]], pools: Sequence[Pool], processes: Processes
    ) -> dict[Pool, Features] | None:
        """Return the features of the `chosen` training and test images for each pool; None but on the first rank."""
        train = self._pooled(data, data.train, "train", chosen[0], pools, processes)
        test = self._pooled(data, data.test, "test", chosen[1], pools, processes)
        if not processes.is_main:
            return None
        labels = [data.train.labels[chosen[0]].to(self.device), data.test.labels[chosen[1]].to(self.device)]
        classes = len(data.class_names)
        sides = zip(pools, train, test, strict=True)
        return {pool: Features(x, labels[0], x2, labels[1], classes) for pool, x, x2 in sides}

    @torch.no_grad()
    def _pooled(
        self,
        data: ImageData,
        images: ImageSet,
        split: str,
        chosen: list[int],
        pools: Sequence[Pool],
        processes: Processes,
    ) -> Float[Tensor, "pools n d"] | None:
        norm = final_norm(self.net) if self.norm else nn.Identity()

        jobs = batches(len(chosen), self.batch_size, processes.size)
        # The batches of this process, in the order in which `map_ordered` asks for them.
        mine = jobs[processes.rank :: processes.size]
        stored = read_ahead(lambda rows: images[chosen[rows.start : rows.stop]][0], mine, self.device)

        def work(rows: range) -> Float[Tensor, "pools b d"]:
            part = chosen[rows.start : rows.stop]
            x = data.network_input(next(stored).to(self.device, non_blocking=True))
            inputs = network_inputs(self.path, x, self.time, part, self.seed, split, 0)
            with computing(self.device, self.precision):
                tokens = norm(next(states_of(self.net, [self.layer], *inputs)))
            return torch.stack([pooled(tokens, pool, self.net.num_prefix_tokens) for pool in pools]).cpu()

        bar = tqdm(total=len(jobs), unit="batch", desc=f"features of {split} images", disable=not processes.is_main)
        parts = []
        with closing(stored), bar:
            for part in processes.map_ordered(jobs, work):
                parts.append(part)
                bar.update()
        return torch.cat(parts, dim=1).to(self.device) if processes.is_main else None


def final_norm(net: nn.Module) -> nn.Module:
    """Return the layer norm that a network applies after its last block; raise a UserError if it has none."""
    norm = dict(net.named_children()).get("norm")
    if norm is None:
        raise UserError(f"--norm: this {type(net).__name__} has no final layer norm")
    return norm
