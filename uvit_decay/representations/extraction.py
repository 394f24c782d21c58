"""Features of the training and test images at one layer, extracted once and kept in memory for several protocols."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from tqdm import tqdm

from uvit_decay.nn.intermediates import HasIntermediates, Pool, pooled, states_of
from uvit_decay.representations.probing import network_inputs
from uvit_decay.runtime.distributed import Processes, batches
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.overlap import read_ahead
from uvit_decay.runtime.precision import Precision, computing

if TYPE_CHECKING:  # other rooms are known by their interfaces alone
    from uvit_decay.data import ImageData
    from uvit_decay.data.batches import ImageSet
    from uvit_decay.diffusion.noise_path import NoisePath


@dataclass(frozen=True)
class Features:
    """Pooled features of images, on one device, with their classes 0 to `classes` - 1."""

    train: Float[Tensor, "n d"]
    train_labels: Int64[Tensor, " n"]
    test: Float[Tensor, "n2 d"]
    test_labels: Int64[Tensor, " n2"]
    classes: int


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
