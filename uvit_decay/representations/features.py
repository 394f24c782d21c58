"""Token states of a network, batch by batch, for probes, protocols, references and figures.

The network is in eval mode. A denoiser gets the null label, so that no class leaks, and one fixed noise for each image
and key. An encoder sees clean images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.nn.intermediates import HasIntermediates, Pool, pooled, states_of
from uvit_decay.runtime.concurrency import free_threads, in_threads, read_ahead
from uvit_decay.runtime.distributed import Processes, batches
from uvit_decay.runtime.precision import Precision, computing
from uvit_decay.runtime.random import indices_on, normal
from uvit_decay.terminal.progress import track

if TYPE_CHECKING:  # data are Lightning's
    from uvit_decay.data.batches import ImageSet

SMALL = 2**28  # bytes of features of jobs that are computed at the same time on a CPU
READING = Lock()  # image files are read by one thread at a time
NoiseKey = Sequence[str | int]


def _split(indices: Sequence[int], batch_size: int, processes: int = 1) -> list[list[int]]:
    """Divide `indices` into consecutive batches, which do not depend on the number of processes, see `batches`."""
    return [[indices[i] for i in rows] for rows in batches(len(indices), batch_size, processes)]


def compute_rows(
    title: str,
    unit: str,
    work: Callable[[int], Tensor],
    jobs: range,
    device: torch.device,
    precision: Precision,
    processes: Processes,
    size: int,
) -> list[Tensor]:
    """Return `work` of the jobs, in order, and show the progress; the other processes return an empty list.

    The processes share the jobs. On a CPU, a single process computes several jobs with small features at once, on the
    cores that torch's threads leave idle.

    Args:
        title: title of the progress.
        unit: name of a job.
        work: function of a job that runs a network.
        jobs: numbers of the jobs.
        device: device of the network.
        precision: precision of the network.
        processes: processes that share the jobs.
        size: bytes of the features of a job.
    """
    threads = 1
    if device.type == "cpu" and processes.size == 1:
        threads = min(len(jobs), free_threads(), SMALL // size)
    done = []
    # The precision is a setting of all threads, so it is set here and not in each of them.
    with (
        computing(device, precision) if threads > 1 else nullcontext(),
        track(title, len(jobs), unit, shown=processes.is_main) as progress,
    ):
        rows = in_threads(work, jobs, threads) if threads > 1 else processes.map_ordered(jobs, work)
        for row in rows:
            done.append(row)
            progress.update()
    return done


@dataclass(frozen=True)
class TokenReader:
    """Reader of the token states of a network.

    Args:
        net: the network, in eval mode, on `device`.
        path: noise path of a denoiser's input; None for an encoder.
        to_input: function that converts stored images, on `device`, to the network's input.
        device: device of the network.
        precision: precision of the network.
        batch_size: images at a time on each device.
    """

    net: HasIntermediates
    path: NoisePath | None
    to_input: Callable[[Tensor], Tensor]
    device: torch.device
    precision: Precision
    batch_size: int

    @torch.no_grad()
    def visit(
        self,
        read: Callable[[list[int]], Tensor],
        indices: Sequence[int],
        layers: Sequence[int],
        level: float,
        keys: Sequence[NoiseKey],
        see: Callable[[int, Float[Tensor, "b draws n d"]], None],
    ) -> None:
        """Call `see` with the position of each layer in `layers` and its token states, on the device, batch by batch.

        All draws of an image are in the same batch, of `batch_size` states or, if there are more draws, one image.

        Args:
            read: function that returns stored images; called in a thread ahead of the network.
            indices: the images.
            layers: numbers of layers, ascending; later ones never run.
            level: noise level of a denoiser's images.
            keys: keys of the noise draws; a noise depends on its key and on the image's index.
            see: function (position, token states) that keeps what it needs.
        """
        jobs = _split(indices, max(1, self.batch_size // len(keys)))
        with self._read_ahead(read, jobs) as stored:
            for part in jobs:
                states = self._run(next(stored), part, layers, level, keys)
                with computing(self.device, self.precision):
                    for position, state in enumerate(states):
                        see(position, state.unflatten(0, (len(part), len(keys))))

    def _read_ahead(
        self, read: Callable[[list[int]], Tensor], jobs: Sequence[list[int]]
    ) -> AbstractContextManager[Iterator[Tensor]]:
        """Return an iterator over the stored images of the jobs, which a thread reads ahead until the context ends."""

        def read_alone(part: list[int]) -> Tensor:
            with READING:
                return read(part)

        return closing(read_ahead(read_alone, jobs, self.device))

    def _run(
        self, stored: Tensor, part: list[int], layers: Sequence[int], level: float, keys: Sequence[NoiseKey]
    ) -> Iterator[Tensor]:
        """Return an iterator over the token states of the layers, which runs the network.

        The rows are images times draws, one draw per key and the draws of an image in a row. An encoder sees each image
        once.
        """
        x = self.to_input(stored.to(self.device, non_blocking=True))
        if self.path is None:
            return states_of(self.net, layers, x)
        rows = indices_on(x.device, part)
        noises = [normal("probe", *key, rows=rows, shape=x.shape[1:]) for key in keys]
        noise = torch.stack(noises, dim=1).flatten(0, 1)
        t = torch.full((len(noise),), level, device=x.device)
        x = self.path.add_noise(x.repeat_interleave(len(keys), dim=0), noise, t)
        return states_of(self.net, layers, x, t)

    def read_pooled(
        self,
        images: ImageSet,
        chosen: Sequence[int],
        layers: Sequence[int],
        level: float,
        key: NoiseKey,
        pools: Sequence[Pool],
        processes: Processes,
        norm: nn.Module | None = None,
        title: str | None = None,
    ) -> Float[Tensor, "pools layers n d"]:
        """Return the pooled tokens of images, float32 on the CPU; the other processes return uninitialised memory.

        Args:
            images: images.
            chosen: indices of the images to read.
            layers: numbers of layers, ascending.
            level: noise level of a denoiser's images.
            key: key of the noise.
            pools: ways to pool the tokens.
            processes: processes that share the batches.
            norm: layer norm to apply before pooling; None for none.
            title: title of the progress; None shows none.
        """
        jobs = _split(chosen, self.batch_size, processes.size)

        @torch.no_grad()
        def work(part: list[int]) -> Float[Tensor, "pools layers b d"]:
            layer_features = []
            states = self._run(next(stored), part, layers, level, [key])  # an autoencoder has its own precision
            with computing(self.device, self.precision):
                for state in states:
                    tokens = state if norm is None else norm(state)
                    by_pool = [pooled(tokens, pool, self.net.num_prefix_tokens) for pool in pools]
                    layer_features.append(torch.stack(by_pool))
            return torch.stack(layer_features, dim=1).cpu()

        out = torch.empty(len(pools), len(layers), len(chosen), self.net.dim)
        start = 0
        shown = title is not None and processes.is_main
        # The batches of this process, in the order in which `map_ordered` asks for them.
        mine = jobs[processes.rank :: processes.size]
        with (
            self._read_ahead(images.stored, mine) as stored,
            track(title or "", len(chosen), "image", shown=shown) as progress,
        ):
            for part in processes.map_ordered(jobs, work):
                end = start + part.shape[2]
                out[:, :, start:end] = part
                start = end
                progress.update(part.shape[2])
        return out
