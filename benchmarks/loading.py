"""Training images in the form of the network, an epoch in one process: random crops, CIFAR's size, cached latents."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks import made
from benchmarks.cases import Agreement, Case, Compared, Setting
from benchmarks.plain import loading as plain
from uvit_decay.data import Augment, AugmentedImages
from uvit_decay.data.batches import InMemory, StepLoader
from uvit_decay.latents.shards import LatentSet
from uvit_decay.pictures import to_float
from uvit_decay.runtime.random import normal

TOLERANCE = 0.05  # of mean and standard deviation: the random changes are not the same


def cases(setting: Setting) -> Iterator[Case]:
    """Yield a case for each kind of data."""
    for make in (crops, pictures, latents):
        with ExitStack() as stack:
            yield make(setting, lambda stack=stack: Path(stack.enter_context(tempfile.TemporaryDirectory())))


def values(batches: Iterable[tuple[Tensor, ...]]) -> Tensor:
    """Return mean and standard deviation of all values of an epoch."""
    images = torch.cat([batch[0] for batch in batches])
    return torch.stack([images.mean(), images.std()])


def case(name: str, count: int, ours: Callable[[], Iterable], theirs: Callable[[], Iterable]) -> Case:
    """Return the case of two readers of an epoch, which are called anew for each."""
    torch.manual_seed(0)
    off = (values(ours()) - values(theirs())).abs().max().item()

    def read(epoch: Callable[[], Iterable]) -> None:
        for _ in epoch():
            pass

    runs = {"ours": partial(read, ours), "plain": partial(read, theirs)}
    return Case(f"load {name}", count, runs, [Compared("-", "ours", "plain", Agreement(off, TOLERANCE))], 9)


def crops(setting: Setting, folder: Callable[[], Path]) -> Case:
    """Random crops of JPEGs of 500x400, as MAE's pre-training reads them."""
    count, size, batch = (16, 32, 8) if setting.quick else (192, 224, 32)
    path, augment = made.photographs(folder(), count, 100 if setting.quick else 500), Augment()
    data = AugmentedImages(str(path), image_size=size, batch_size=batch, augment=augment, num_workers=0, memory_gb=0.0)
    data.setup()

    def ours() -> Iterator[tuple[Tensor, ...]]:
        for found in data.train_dataloader():
            yield data.network_input(found.images), found.labels

    loader = plain.crops(path, size, augment.crop_scale, batch)
    return case(f"random crops of JPEGs, {size}x{size}", count, ours, lambda: loader)


def pictures(setting: Setting, folder: Callable[[], Path]) -> Case:
    """Images of CIFAR's size in memory, mirrored."""
    count = 256 if setting.quick else 10_000
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(count) % 100
    data = made.loader(InMemory(images, labels), 128)
    reference = plain.Pictures(images.permute(0, 2, 3, 1).contiguous().numpy(), labels.tolist())
    loader = DataLoader(reference, 128, shuffle=True, drop_last=True)
    return case("images in memory, 32x32x3", count - count % 128, partial(floats, data), lambda: loader)


def floats(data: StepLoader) -> Iterator[tuple[Tensor, ...]]:
    """Yield the batches of an epoch as a network gets them."""
    for batch in data:
        yield to_float(batch.images), batch.labels


def latents(setting: Setting, folder: Callable[[], Path]) -> Case:
    """Cached latents, mirrored, their posterior sampled; every byte that we read is verified."""
    count = 64 if setting.quick else 2048
    path, files = folder(), folder()
    manifest, moments = made.latents(path, count)
    for i, sides in enumerate(moments.float().numpy()):
        for side in range(2):
            plain.write_feature(files, i, side, sides[side], i % 1000)
    data = made.loader(LatentSet(path, manifest), 64)

    def ours() -> Iterator[tuple[Tensor, ...]]:
        for batch in data:
            noise = normal("posterior", "train", 0, rows=batch.sample_ids, shape=(4, 32, 32))
            yield made.SPACE.sample(batch.images, noise), batch.labels

    reference = plain.Features(files, count, made.SPACE.scale)
    loader = DataLoader(reference, 64, shuffle=True, drop_last=True)
    return case("cached latents, 32x32x4", count, ours, lambda: loader)
