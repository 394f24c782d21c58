"""Token states of a network, batch by batch: the one loop of probes, protocols, references and figures.

The network is in eval mode. A denoiser gets the null label, so that no class leaks, and an image one fixed noise for
each key; an encoder sees clean images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.nn.intermediates import HasIntermediates, Pool, pooled, states_of
from uvit_decay.runtime.concurrency import read_ahead
from uvit_decay.runtime.distributed import Processes, batches
from uvit_decay.runtime.precision import Precision, computing
from uvit_decay.runtime.random import indices_on, normal

if TYPE_CHECKING:  # data are Lightning's
    from uvit_decay.data.batches import ImageSet

READING = Lock()  # image files are read by one thread at a time


def final_norm(net: nn.Module) -> nn.Module | None:
    """Return the layer norm that a network applies after its last block; None if it has none."""
    return dict(net.named_children()).get("norm")


@dataclass(frozen=True)
class TokenReader:
    """A network whose token states are read.

    Args:
        net: the network, in eval mode, on `device`.
        path: noise path of a denoiser's input; None for an encoder.
        to_input: brings stored images, on `device`, to the scale of the network.
        device: where it computes.
        precision: of the network.
        batch_size: images at a time on each device.
    """

    net: HasIntermediates
    path: NoisePath | None
    to_input: Callable[[Tensor], Tensor]
    device: torch.device
    precision: Precision
    batch_size: int

    def states(
        self,
        read: Callable[[list[int]], Tensor],
        indices: Sequence[int],
        layers: Sequence[int],
        level: float,
        *key: str | int,
        reduce: Callable[[Tensor], Tensor],
        processes: Processes,
    ) -> Iterator[Float[Tensor, "layers ..."]]:
        """Yield `reduce` of the token states of the layers, stacked, on the CPU, for each batch in order.

        Args:
            read: returns stored images; called in a thread ahead of the network.
            indices: the images; with `key` they determine the noise.
            layers: numbers of layers, ascending; later ones never run.
            level: noise level of a denoiser's images.
            key: key of the noise.
            reduce: function of the token states (b, n, d) of a layer.
            processes: share the batches. Only the first one gets them, but all must exhaust the iterator.
        """
        jobs = [[indices[i] for i in rows] for rows in batches(len(indices), self.batch_size, processes.size)]

        def locked(part: list[int]) -> Tensor:
            with READING:
                return read(part)

        @torch.no_grad()
        def work(part: list[int]) -> Tensor:
            x = self.to_input(next(stored).to(self.device, non_blocking=True))
            inputs: tuple[Tensor, ...] = (x,)
            if self.path is not None:
                noise = normal("probe", *key, rows=indices_on(x.device, part), shape=x.shape[1:])
                t = torch.full((len(x),), level, device=x.device)
                inputs = self.path.add_noise(x, noise, t), t
            with computing(self.device, self.precision):
                found = torch.stack([reduce(state) for state in states_of(self.net, layers, *inputs)])
            return found.cpu()

        # The batches of this process, in the order in which `map_ordered` asks for them.
        with closing(read_ahead(locked, jobs[processes.rank :: processes.size], self.device)) as stored:
            yield from processes.map_ordered(jobs, work)

    def pooled(
        self,
        images: ImageSet,
        chosen: Sequence[int],
        layers: Sequence[int],
        level: float,
        *key: str | int,
        pools: Sequence[Pool],
        norm: nn.Module | None = None,
        processes: Processes,
        title: str | None = None,
    ) -> Float[Tensor, "pools layers n d"]:
        """Return the tokens of the chosen images, after `norm`, pooled in several ways; float32 on the CPU.

        They are written in place, on the first process alone. With a title there is a progress bar; other arguments are
        those of `states`.
        """

        def reduce(state: Tensor) -> Tensor:
            tokens = state if norm is None else norm(state)
            return torch.stack([pooled(tokens, pool, self.net.num_prefix_tokens) for pool in pools])

        out, start = torch.empty(len(pools), len(layers), len(chosen), self.net.dim), 0
        with tqdm(total=len(chosen), unit="image", desc=title, disable=title is None or not processes.is_main) as bar:
            for part in self.states(images.stored, chosen, layers, level, *key, reduce=reduce, processes=processes):
                end = start + part.shape[2]  # (layers, pools, b, d)
                out[:, :, start:end] = part.transpose(0, 1)
                start = end
                bar.update(part.shape[2])
        return out
