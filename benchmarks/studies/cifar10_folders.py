"""Write CIFAR-10 as the class folders that the scripts of the studies read.

python -m benchmarks.studies.cifar10_folders [--data data] [--download] [--out .]

Writes cifar10-train/<class>/<number>.png (50,000 images) and cifar10-test/<class>/<number>.png (10,000) into --out; the
number is the image's place in the official files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from uvit_decay.data import CIFAR10
from uvit_decay.data.batches import ImageSet
from uvit_decay.terminal.errors import user_errors


def write_folders(images: ImageSet, class_names: Sequence[str], folder: Path) -> None:
    """Write a PNG file for each image of a set into the folder of its class."""
    for name in class_names:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(len(images)):
        (image,), (label,) = images[[number]]
        pixels = image.permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / class_names[label] / f"{number:05d}.png")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the official files")
    parser.add_argument("--download", action="store_true", help="download them (170 MB) if they are missing")
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args(words)
    with user_errors():
        data = CIFAR10(options.data, options.download, batch_size=1)
        data.prepare_data()
        data.setup()
        for split, images in (("train", data.train), ("test", data.test)):
            folder = options.out / f"cifar10-{split}"
            write_folders(images, data.class_names, folder)
            print(f"wrote {len(images):,} images to {folder}")


if __name__ == "__main__":
    main()
