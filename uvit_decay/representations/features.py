"""Token states of a network, batch by batch: the one loop of probes, protocols, references and figures.

The network is in eval mode. A denoiser gets the null label, so that no class leaks, and an image one fixed noise for
each key; an encoder sees clean images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Lock

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.nn.intermediates import HasIntermediates, Pool, pooled, states_of
from uvit_decay.runtime.concurrency import read_ahead
from uvit_decay.runtime.distributed import Processes, batches
from uvit_decay.runtime.precision import Precision, computing
from uvit_decay.runtime.random import indices_on, normal

READING = Lock()  # image files are read by one thread at a time


def final_norm(net: nn.Module) -> nn.Module | None:
    """Return the layer norm that a network applies after its last block; None if it has none."""
    return dict(net.named_children()).get("norm")


def pooling(
    net: HasIntermediates, pools: Sequence[Pool], norm: nn.Module | None = None
) -> Callable[[Float[Tensor, "b n d"]], Float[Tensor, "pools b d"]]:
    """Return a function that pools the tokens of a layer in several ways, after `norm` if there is one."""

    def pool_all(state: Tensor) -> Tensor:
        tokens = state if norm is None else norm(state)
        return torch.stack([pooled(tokens, pool, net.num_prefix_tokens) for pool in pools])

    return pool_all


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
