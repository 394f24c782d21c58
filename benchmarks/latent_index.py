"""What opening and shuffling the latents of an ImageNet-sized set costs, in seconds and memory.

python -m benchmarks.latent_index; a temporary folder, whose shards are holes without bytes on the disk.
"""

from __future__ import annotations

import json
import struct
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import made
from uvit_decay.latents.manifest import read
from uvit_decay.latents.shards import LatentSet, write_labels

IMAGENET = 1_281_167


def hollow_shard(path: Path, count: int) -> None:
    """Write a shard whose moments are a hole in the file: right in every length, and no bytes on the disk."""
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
    """Return MiB of this process: its own, and with mapped files, which the system can take back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {name: int(found[key].split()[0]) // 1024 for name, key in (("own", "RssAnon"), ("with files", "VmRSS"))}


def measure(folder: Path) -> None:
    """Print seconds and memory of opening and shuffling such an index."""
    manifest = made.index(IMAGENET, 1024)
    for name, part in manifest.shards:
        hollow_shard(folder / name, len(part))
    manifest.write(folder)
    write_labels(folder, torch.arange(IMAGENET) % 1000)
    before, start = megabytes(), time.perf_counter()
    data = made.loader(LatentSet(folder, read(folder, whole=False)), 256)
    order = iter(data.sampler)
    next(order)
    print(
        f"index of {IMAGENET} images in {len(manifest.shards)} shards: opened and shuffled in "
        f"{time.perf_counter() - start:.2f} s; MiB before {before}, after {megabytes()}"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder))


if __name__ == "__main__":
    main()
