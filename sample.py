"""Sample images from a checkpoint: python sample.py [--ckpt runs/.../last.ckpt] [--num 64] [--out samples.png] ...

Image i is a function of (checkpoint, seed, i, label) alone, whatever the batch size. Options that are not given are
those that the checkpoint recommends. --out is a grid (.png), an array for evaluation (.npz) or a folder of PNGs.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from uvit_decay.errors import UserError, one_line, user_errors

TINY = 5_000_000  # parameters
BUNDLED = Path(__file__).resolve().parent / "checkpoints" / "digits.safetensors"


def parse(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ckpt", type=Path, default=BUNDLED, help="a .ckpt or .safetensors; default: the bundled digits"
    )
    parser.add_argument("--num", type=int, help="images; default: 10 for each class, 64 without")
    parser.add_argument(
        "--classes", help="comma-separated class numbers, taken in turn; default: all, the first 10 in a grid"
    )
    parser.add_argument("--guidance", type=float, help="scale w of uncond + w (cond - uncond); 1 is none")
    parser.add_argument(
        "--guidance-interval", help="two times LOW,HIGH between which to guide, 0 is data and 1 is noise; default: all"
    )
    parser.add_argument("--guidance-channels", type=int, help="guide the first so many channels only; default: all")
    parser.add_argument(
        "--sampler",
        help="dpm++, ddim, ddpm, euler-maruyama, euler, heun, dopri5, uvit-dpm, uvit-em, sit-ode, sit-sde(-heun)",
    )
    parser.add_argument("--steps", type=int, help="steps; default: the checkpoint's, or another sampler's own")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--batch-size", type=int, default=64, help="images at a time; changes no image; default: 64")
    parser.add_argument("--weights", choices=("ema", "raw"), help="default: EMA where the checkpoint has them")
    parser.add_argument("--vae", help="autoencoder that decodes latents, hub id or folder; default: the checkpoint's")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps; default: the GPU if there is one")
    parser.add_argument(
        "--trust", action="append", default=[], metavar="CLASS", help="network class from elsewhere to allow"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("samples.png"), help=".png, .npz or a folder; default: samples.png"
    )
    return parser.parse_args(args)


def choose_classes(words: str | None, num_classes: int) -> list[int]:
    """The classes that the images take in turn; none for an unconditional network."""
    if not words:
        return list(range(num_classes))
    if not num_classes:
        raise UserError("this checkpoint is unconditional: leave out --classes")
    try:
        classes = [int(word) for word in words.split(",")]
    except ValueError as error:
        raise UserError(f"--classes takes numbers such as 0,1,2, got {words!r}") from error
    if not all(0 <= label < num_classes for label in classes):
        raise UserError(f"--classes {words}: this checkpoint has the classes 0 to {num_classes - 1}")
    return classes


def chosen_sampling(options: argparse.Namespace, recommended: str) -> dict[str, Any]:
    """What the options change of the sampling that a checkpoint recommends."""
    names = ("sampler", "steps", "guidance", "guidance_channels")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.sampler not in (None, recommended):  # another one has its own number of steps, and its own SDE if any
        given = {"steps": None, "sde": None, **given}
    if options.guidance_interval is not None:
        try:
            low, high = map(float, options.guidance_interval.split(","))
        except ValueError as error:
            words = options.guidance_interval
            raise UserError(f"--guidance-interval takes two times such as 0.1,0.6, got {words!r}") from error
        given["guidance_interval"] = low, high
    return given


def pick_device(name: str | None, local_rank: int) -> "torch.device":  # noqa: F821  torch is imported late
    import torch

    if name is None:
        name = f"{torch.accelerator.current_accelerator()}:{local_rank}" if torch.accelerator.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {one_line(error)}") from error


def main(args: Sequence[str]) -> None:
    options = parse(args)
    if (options.num is not None and options.num < 1) or options.batch_size < 1 or options.seed < 0:
        raise UserError("--num and --batch-size must be at least 1, --seed at least 0")
    from uvit_decay import image
    from uvit_decay.disk import check_writable

    form = options.out.suffix.lower()
    if form not in ("", ".png", ".npz"):
        raise UserError(f"--out {options.out}: a .png (grid), an .npz (array) or a folder without a suffix")
    check_writable(options.out, folder=not form)
    if not form and any(options.out.iterdir()):
        raise UserError(f"--out {options.out}: the folder is not empty, and its files would be mixed with the new ones")

    import torch
    from accelerate import PartialState
    from accelerate.utils import gather_object
    from tqdm import tqdm

    from uvit_decay import checkpoint
    from uvit_decay.autoencoder import decoder
    from uvit_decay.diffusion.generate import generate, share

    found = checkpoint.load(options.ckpt, options.weights, options.trust)
    processes = PartialState(cpu=not torch.cuda.is_available())
    source = found.source(pick_device(options.device, processes.local_process_index))
    sampling = replace(source.unguided(found.sampling), **chosen_sampling(options, found.sampling.sampler))
    source.check(sampling)
    if options.vae is not None and not found.latents:
        raise UserError("--vae: this checkpoint makes pixels, there is nothing to decode")
    finish = decoder(found.latents, options.vae, source.device).decode if found.latents else image.to_uint8
    if source.device.type == "cpu" and not found.latents and sum(p.numel() for p in found.net.parameters()) < TINY:
        torch.set_num_threads(1)  # more threads only wait for each other: up to 3 times slower on a busy machine
    classes = choose_classes(options.classes, source.num_classes)
    if form == ".png" and not options.classes:
        classes = classes[:10]  # as many columns as fit
    num = options.num or (10 * len(classes) if classes else 64)

    parts: list[torch.Tensor] = []
    mine = share(num, processes.process_index, processes.num_processes)
    labels = [classes[i % len(classes)] for i in mine] if classes else None
    what = f"{sampling.describe()}, {found.weights} weights"
    with tqdm(total=len(mine), unit="image", desc=what, disable=not processes.is_main_process) as bar:
        for batch in generate(source, sampling, mine, labels, options.seed, options.batch_size):
            parts.append(finish(batch).cpu())
            bar.update(len(batch))
    images = torch.cat(gather_object(parts))
    if processes.is_main_process:
        columns = min(image.grid_columns(len(classes)), num)
        names = [found.class_names[classes[i % len(classes)]] for i in range(columns)] if classes else []
        if not form:
            image.save_pngs(options.out, images)
        elif form == ".npz":
            image.save_npz(options.out, images)
        else:
            image.labelled_grid(images, columns, names).save(options.out)
        print(f"wrote {options.out}: {num} images, step {found.step} of {options.ckpt}")
    processes.destroy_process_group()


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
