"""What the data paths deliver: images in memory, cached latents, random crops, the memory of an ImageNet-sized index.

python benchmarks/data_speed.py [--parts memory latents crops] [--threads 1] [--batches 40] [--workers 2]
    [--photographs FOLDER]; temporary files; medians after a warm-up. Random crops are compared with torchvision's
    ImageFolder and DataLoader, in turns, on the JPEGs of a folder of class folders, or on synthetic ones of 500x400.
"""

import argparse
import json
import resource
import statistics
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from uvit_decay.autoencoder import LatentSpace
from uvit_decay.data import Augment, AugmentedImages
from uvit_decay.data.augment import rand_augment
from uvit_decay.data.batches import Batch, ImageSet, InMemory, Mirror, StepLoader, StepSampler
from uvit_decay.data.classes import class_hash
from uvit_decay.data.latents.manifest import Manifest, read
from uvit_decay.data.latents.shards import LatentSet, write_labels, write_shard
from uvit_decay.image_io import to_float
from uvit_decay.nn.sizes import create_model
from uvit_decay.runtime.random import normal

IMAGENET = 1_281_167
SPACE = LatentSpace("random", "", 0.18215, 0.0, 4, 8)


def loader(images: ImageSet, batch_size: int) -> StepLoader:
    return StepLoader(images, StepSampler(len(images), batch_size, 0, 0, 1, shuffle=True), augment=Mirror(0))


def rate(batches: Iterator[Batch], count: int) -> float:
    """Median images/s of `count` batches, after five."""
    rates = []
    for _ in range(count + 5):
        start = time.perf_counter()
        batch = next(batches)
        rates.append(len(batch.images) / (time.perf_counter() - start))
    return statistics.median(rates[5:])


def pixels(batch_size: int = 128) -> Iterator[Batch]:
    """CIFAR's size, mirrored, as a network gets them."""
    images = torch.randint(256, (50_000, 3, 32, 32), dtype=torch.uint8)
    data = loader(InMemory(images, torch.arange(50_000) % 100), batch_size)
    while True:
        for batch in data:
            yield batch._replace(images=to_float(batch.images))


def training_rate(steps: int = 3, batch_size: int = 4) -> float:
    """Images/s of U-ViT-S/2, forward and backward."""
    net = create_model("uvit-s/2", alpha_min=0.7)
    x, t = torch.randn(batch_size, 3, 32, 32), torch.rand(batch_size)
    rates = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        net(x, t).square().mean().backward()
        rates.append(batch_size / (time.perf_counter() - start))
    return statistics.median(rates[1:])


def index(count: int, shard_size: int) -> Manifest:
    classes = {f"n{i:08d}": len(range(i, count, 1000)) for i in range(1000)}
    settings = {"dtype": "float16", "precision": "float32", "batch_size": 16, "shard_size": shard_size}
    return Manifest(SPACE, "", "", count, 256, classes, None, class_hash(tuple(classes)), **settings)


def latents(folder: Path, count: int, batch_size: int, verify: bool) -> Iterator[Batch]:
    """Cached latents, mirrored, their posterior sampled, as a network gets them; `verify` their checksums."""
    manifest, labels = index(count, 1024), torch.arange(count) % 1000
    for number, (_, part) in enumerate(manifest.shards):
        moments = torch.randn(len(part), *manifest.row).half()
        write_shard(
            folder,
            manifest,
            number,
            moments,
            labels[part.start : part.stop],
            torch.zeros(len(part), dtype=torch.int64),
            {},
        )
    write_labels(folder, labels)
    data = loader(LatentSet(folder, manifest, verify), batch_size)
    while True:
        for batch in data:
            noise = normal("posterior", "train", 0, rows=batch.rows, shape=(4, 32, 32))
            yield batch._replace(images=SPACE.sample(batch.images, noise))


def hollow_shard(path: Path, count: int) -> None:
    """A shard whose moments are a hole in the file: right in every length, and no bytes on the disk."""
    labels, moments = 8 * count, 2 * count * 2 * 8 * 32 * 32
    tensors = {
        "labels": {"dtype": "I64", "shape": [count], "data_offsets": [0, labels]},
        "moments": {"dtype": "F16", "shape": [count, 2, 8, 32, 32], "data_offsets": [labels, labels + moments]},
    }
    header = json.dumps(tensors).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + labels + moments)


def megabytes() -> dict[str, int]:
    """Of this process: its own memory, and with mapped files (libraries, shards), which the system can take back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {name: int(found[key].split()[0]) // 1024 for name, key in (("own", "RssAnon"), ("with files", "VmRSS"))}


def imagenet_index(folder: Path) -> None:
    manifest = index(IMAGENET, 1024)
    for name, part in manifest.shards:
        hollow_shard(folder / name, len(part))
    manifest.write(folder)
    write_labels(folder, torch.arange(IMAGENET) % 1000)
    before, start = megabytes(), time.perf_counter()
    data = loader(LatentSet(folder, read(folder, whole=False)), 256)
    order = iter(data.sampler)
    next(order)
    print(
        f"index of {IMAGENET} images in {len(manifest.shards)} shards: opened and shuffled in "
        f"{time.perf_counter() - start:.2f} s; MiB before {before}, after {megabytes()}"
    )


def photographs(folder: Path, source: Path | None, count: int) -> Path:
    """A folder of `count` JPEGs in two classes: links to those of `source`, again and again, or synthetic ones."""
    files = sorted(source.rglob("*.[jJ]*")) if source else []
    for i in range(count):
        path = folder / ("a", "b")[i % 2] / f"{i:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if files:
            path.symlink_to(files[i % len(files)].resolve())
        else:
            random = np.random.default_rng(i)
            coarse = Image.fromarray(random.integers(0, 256, (25, 20, 3), dtype=np.uint8)).resize((500, 400))
            grain = random.normal(0, 8, (400, 500, 3))
            Image.fromarray((np.asarray(coarse) + grain).clip(0, 255).astype(np.uint8)).save(path, quality=90)
    return folder


def theirs(folder: Path, augment: Augment, batch_size: int, workers: int) -> DataLoader:
    """The usual pipeline of MAE's code."""
    steps = [
        transforms.RandomResizedCrop(224, augment.crop_scale, interpolation=transforms.InterpolationMode.BICUBIC),
        transforms.RandomHorizontalFlip(),
        *([rand_augment(augment.rand_augment, 224, 3)] if augment.rand_augment else []),
        transforms.ToTensor(),
    ]
    images = ImageFolder(str(folder), transforms.Compose(steps))
    return DataLoader(images, batch_size, shuffle=True, num_workers=workers, drop_last=True)


def ours(folder: Path, augment: Augment, batch_size: int, workers: int) -> StepLoader:
    data = AugmentedImages(str(folder), batch_size=batch_size, augment=augment, num_workers=workers)
    data.setup()
    return data.train_dataloader()


def epoch(batches: DataLoader, batch_size: int, skipped: int) -> tuple[float, float]:
    """Images/s of an epoch without its first batches, and images per second of its reader processes' CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    iterator = iter(batches)
    for _ in range(skipped):
        next(iterator)
    start = time.perf_counter()
    count = sum(1 for _ in iterator)
    seconds = time.perf_counter() - start
    batches._iterator = None  # ends the processes, whose CPU time is counted then
    del iterator
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return count * batch_size / seconds, (count + skipped) * batch_size / busy


def crops(source: Path | None, workers: int, rounds: int = 5, batch_size: int = 32, count: int = 768) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = photographs(Path(name), source, count)
        for augment in (Augment(), Augment(rand_augment="rand-m9-mstd0.5-inc1")):
            found = [
                [epoch(make(folder, augment, batch_size, workers), batch_size, 2 * workers) for make in (theirs, ours)]
                for _ in range(rounds + 1)
            ][1:]
            (their_rate, their_core), (our_rate, our_core) = np.median(found, axis=0)
            ratio, core = (statistics.median(b[i] / a[i] for a, b in found) for i in range(2))
            print(
                f"random crops of {'photographs' if source else 'synthetic JPEGs'}, {workers} workers, "
                f"{augment.rand_augment or 'no RandAugment'}: {our_rate:.0f} images/s, torchvision {their_rate:.0f}, "
                f"ratio {ratio:.2f}; for a second of a core {our_core:.0f}, torchvision {their_core:.0f}, {core:.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("memory", "latents", "crops")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--photographs", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if "latents" in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            imagenet_index(Path(folder))
        for verify in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                found = rate(latents(Path(folder), 8192, 256, verify), options.batches)
                print(f"cached latents, batch 256, {'' if verify else 'not '}verified: {found:,.0f} images/s")
    if "memory" in options.parts:
        read, trained = rate(pixels(), options.batches), training_rate()
        print(f"images in memory: {read:,.0f} images/s; U-ViT-S/2 trains at {trained:.2f}: ratio {read / trained:,.0f}")
    if "crops" in options.parts:
        crops(options.photographs, options.workers)


if __name__ == "__main__":
    main()
