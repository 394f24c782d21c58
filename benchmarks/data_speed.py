"""What the data paths deliver: images in memory, cached latents, and the memory of an ImageNet-sized index.

python benchmarks/data_speed.py [--threads 1] [--batches 40]; random data, temporary files; medians after a warm-up.
"""

import argparse
import json
import statistics
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from uvit_decay.autoencoder import LatentSpace
from uvit_decay.data.batches import Batch, ImageSet, InMemory, Mirror, StepLoader, StepSampler
from uvit_decay.data.classes import class_hash
from uvit_decay.data.latents.manifest import Manifest, read
from uvit_decay.data.latents.shards import LatentSet, write_labels, write_shard
from uvit_decay.image_io import to_float
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
    net = build("uvit-s/2", alpha_min=0.7)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        imagenet_index(Path(folder))
    for verify in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            found = rate(latents(Path(folder), 8192, 256, verify), options.batches)
            print(f"cached latents, batch 256, {'' if verify else 'not '}verified: {found:,.0f} images/s")
    read, trained = rate(pixels(), options.batches), training_rate()
    print(f"images in memory: {read:,.0f} images/s; U-ViT-S/2 trains at {trained:.2f}: ratio {read / trained:,.0f}")


if __name__ == "__main__":
    main()
