"""Sample images from a checkpoint: python sample.py [--ckpt runs/.../last.ckpt] [--num 64] [--out samples.png] ...

Image i is a function of (checkpoint, seed, i, label) alone, whatever the batch size. Options that are not given are
those that the checkpoint recommends. --out is a grid (.png), an array for evaluation (.npz) or a folder of PNGs, which
the same command completes after an interruption. On P processes, which write what one does:

    torchrun --nproc_per_node P -- sample.py --num 50000 --out samples.npz
    accelerate launch --multi_gpu --num_processes P --num_machines 1 --mixed_precision no --dynamo_backend no \\
        sample.py --num 50000 --out samples.npz

torchrun takes --num for an abbreviation of an option of its own unless -- stands before the script. It leaves -n alone.
Fewer processes than the launcher was asked for are refused. A single one of accelerate does not know that number, so it
is refused, too, unless --processes 1 is given.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from uvit_decay.runtime.errors import UserError, user_errors
from uvit_decay.sampling_options import LARGEST_GRID, add_sampling_options, check_numbers

BUNDLED = Path(__file__).resolve().parent / "checkpoints" / "digits.safetensors"
LONG = 60  # seconds; longer runs print their cost before the start


def parse(args: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ckpt", type=Path, default=BUNDLED, help="a .ckpt or .safetensors; default: the bundled digits"
    )
    parser.add_argument("-n", "--num", type=int, help="images; default: 10 for each class, 64 without")
    parser.add_argument(
        "--out", type=Path, default=Path("samples.png"), help=".png, .npz or a folder; default: samples.png"
    )
    parser.add_argument(
        "--processes", type=int, help="refuse any other number; default: that of the launcher, where known"
    )
    add_sampling_options(parser)
    return parser.parse_args(args)


def check(options: argparse.Namespace) -> None:
    """Raise a UserError for options that cannot work, before any slow work."""
    from uvit_decay.runtime.files import check_writable
    from uvit_decay.sampled_folder import check_folder

    check_numbers(options)
    out, form = options.out, options.out.suffix.lower()
    if form not in ("", ".png", ".npz"):
        raise UserError(f"--out {out}: a .png (grid), an .npz (array) or a folder without a suffix")
    if form == ".png" and (options.num or 0) > LARGEST_GRID:
        raise UserError(f"--out {out}: a grid takes at most {LARGEST_GRID} images; name an .npz or a folder")
    check_writable(out, folder=not form)
    if not form:
        check_folder(out)


def write(out: Path, sampled: "Samples", numbers: Sequence[int], images: "Iterator[Tensor]") -> None:
    """Write the images with these indices; batch by batch, except a grid, which is assembled in memory."""
    import torch

    from uvit_decay import image_io as image

    form, classes, names = out.suffix.lower(), sampled.classes, sampled.found.class_names
    if not form:
        image.save_pngs(out, images, numbers)
    elif form == ".npz":
        image.save_npz(out, images, len(numbers), sampled.labels(numbers))
    else:
        columns = min(image.grid_columns(len(classes)), len(numbers))
        header = [] if sampled.at_random else [names[label] for label in sampled.labels(range(columns)) or ()]
        image.save_image(out, image.labelled_grid(torch.cat(list(images)), columns, header))


def main(args: Sequence[str]) -> None:
    """Run the command line."""
    options = parse(args)
    check(options)

    from uvit_decay.runtime.distributed import Processes

    processes = Processes.launched(options.processes)
    try:
        make(options, processes)
    finally:
        processes.end()


def make(options: argparse.Namespace, processes: "Processes") -> None:
    """Sample this rank's share of the images; rank 0 holds a lock on the output, gathers and writes all of them."""
    from uvit_decay.runtime.files import claimed
    from uvit_decay.samples import Samples

    sampled = Samples.from_options(options.ckpt, options, processes.local_rank)
    if options.out.suffix.lower() == ".png":  # at most 10 classes, a column each
        classes = sampled.classes if options.classes else sampled.classes[:10]
        sampled = replace(sampled, classes=classes, at_random=options.labels == "random")
    with claimed(options.out, processes.is_main):
        make_missing(options, sampled, processes)


def make_missing(options: argparse.Namespace, sampled: "Samples", processes: "Processes") -> None:
    """Sample and write all images but those that the folder holds already."""
    from tqdm import tqdm

    from uvit_decay.runtime.distributed import batches
    from uvit_decay.sampled_folder import missing

    num = options.num or (10 * len(sampled.classes) or 64)
    numbers: Sequence[int] = range(num)
    if not options.out.suffix:
        numbers = processes.broadcast(missing(options.out, sampled, num) if processes.is_main else [])
    jobs = [numbers[part.start : part.stop] for part in batches(len(numbers), options.batch_size, processes.size)]
    parts = processes.map_ordered(jobs, lambda part: sampled.images(part).cpu())
    if not processes.is_main:
        list(parts)  # yields nothing on this rank, but does its share of the work
        return
    seconds = sampled.seconds(len(numbers), options.batch_size) / processes.size
    if seconds > LONG:
        evaluations = sampled.sampling.nfe or "adaptively many (about 100, one image after the other)"
        each = f"{len(numbers)} images, each {evaluations} network evaluations"
        print(f"{each}, take about {seconds / 60:.0f} min: --sampler and --steps change that", file=sys.stderr)
    what = f"{sampled.sampling.name}, {sampled.found.weights} weights"
    with tqdm(total=num, initial=num - len(numbers), unit="image", desc=what) as bar:
        write(options.out, sampled, numbers, shown(parts, bar))
    there = "" if len(numbers) == num else f", {num - len(numbers)} were there"
    print(f"wrote {options.out}: {len(numbers)} images{there}, step {sampled.found.step} of {sampled.ckpt}")


def shown(parts: "Iterator[Tensor]", bar: "tqdm") -> "Iterator[Tensor]":
    """Yield the same batches, and count their images in a progress bar."""
    for part in parts:
        bar.update(len(part))
        yield part


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
