"""Command-line options for sampling from a checkpoint, shared by all scripts; imports no torch."""

from __future__ import annotations

import argparse
from typing import Any

from uvit_decay.runtime.errors import MOST_SEED, UserError, check_whole

LARGEST_GRID = 10_000  # images; a grid is assembled in memory
MOST_IMAGES = 10_000_000  # 200 times what papers sample
BOUNDS = {  # least and largest values of options of all scripts
    "num": (1, MOST_IMAGES),
    "processes": (1, 2**16),
    "batch_size": (1, MOST_IMAGES),
    "shard_size": (1, MOST_IMAGES),
    "workers": (0, 2**16),
    "image_size": (1, 2**16),
    "kid_subset": (2, MOST_IMAGES),
    "max_train": (1, 2**31),
    "max_test": (1, 2**31),
    "fit": (1, MOST_IMAGES),
    "points": (1, MOST_IMAGES),
    "clusters": (2, 255),
    "neighbours": (1, 2**16),
    "heads": (1, 2**16),
    "num_classes": (0, 2**24),
    "seed": (0, MOST_SEED),
}


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add all sampling options but checkpoint, number of images and output; see `Samples.from_options`."""
    parser.add_argument("--classes", help="comma-separated class numbers; default: all, the first 10 in a grid")
    parser.add_argument(
        "--labels",
        choices=("balanced", "random"),
        help="classes in turn, or drawn at random, a function of seed and number of the image; default: balanced in a "
        "grid and while training, random with the papers' samplers, as for their FID, else balanced",
    )
    parser.add_argument("--guidance", type=float, help="scale w of uncond + w (cond - uncond); 1 is none")
    parser.add_argument(
        "--guidance-interval", help="two times LOW,HIGH between which to guide, 0 is data and 1 is noise; default: all"
    )
    parser.add_argument("--guidance-channels", type=int, help="guide the first so many channels only; default: all")
    parser.add_argument(
        "--sampler",
        help="dpm++, ddim, ddpm, euler-maruyama, euler, heun, dopri5; as the papers sample: uvit-dpm, uvit-dpm++, "
        "uvit-em, sit-ode, sit-sde, sit-sde-heun",
    )
    parser.add_argument(
        "--clip",
        action=argparse.BooleanOptionalAction,
        help="clamp the denoised image to [-1, 1] at every step; default: the checkpoint's, else pixels are clipped, "
        "but not by the papers' samplers",
    )
    parser.add_argument("--steps", type=int, help="steps; default: the checkpoint's, or another sampler's own")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--batch-size", type=int, default=64, help="images at a time; changes no image; default: 64")
    parser.add_argument("--weights", choices=("ema", "raw"), help="default: EMA where the checkpoint has them")
    parser.add_argument("--vae", help="autoencoder that decodes latents, hub id or folder; default: the checkpoint's")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps; default: the GPU if there is one")
    add_precision_option(parser)
    parser.add_argument(
        "--trust", action="append", default=[], metavar="CLASS", help="network class from elsewhere to allow"
    )


def add_precision_option(parser: argparse._ActionsContainer) -> None:
    """Add the option --precision of the network."""
    words = "of the network; said in names and reports unless float32; default: tf32 on CUDA GPUs, float32 elsewhere"
    parser.add_argument("--precision", choices=("float32", "tf32", "bf16"), help=words)


def check_numbers(options: argparse.Namespace) -> None:
    """Raise a UserError if a number is out of range; needs no file to be read."""
    for name, (least, most) in BOUNDS.items():
        value = getattr(options, name, None)
        if value is not None:
            check_whole(least, most, **{f"--{name.replace('_', '-')}": value})


def choose_classes(options: argparse.Namespace, num_classes: int) -> list[int]:
    """Return the classes of --classes, by default all; empty for an unconditional network.

    Raises:
        UserError: a class that does not exist, or classes or labels for an unconditional network.
    """
    words = options.classes
    if not num_classes and (words or options.labels):
        raise UserError(f"this checkpoint is unconditional: leave out --{'classes' if words else 'labels'}")
    if not words:
        return list(range(num_classes))
    try:
        classes = [int(word) for word in words.split(",")]
    except ValueError as error:
        raise UserError(f"--classes takes numbers such as 0,1,2, got {words!r}") from error
    if not all(0 <= label < num_classes for label in classes):
        raise UserError(f"--classes {words}: this checkpoint has the classes 0 to {num_classes - 1}")
    return classes


def chosen_sampling(options: argparse.Namespace, recommended: str) -> dict[str, Any]:
    """Return the fields of `Sampling` that the options change; `recommended` is the sampler of the checkpoint."""
    names = ("sampler", "steps", "guidance", "guidance_channels", "clip", "precision")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.sampler not in (None, recommended):  # they are the recommended sampler's: use the defaults of this one
        given = {"steps": None, "clip": None, "sde": None, **given}
    if options.guidance_interval is not None:
        try:
            low, high = map(float, options.guidance_interval.split(","))
        except ValueError as error:
            words = options.guidance_interval
            raise UserError(f"--guidance-interval takes two times such as 0.1,0.6, got {words!r}") from error
        given["guidance_interval"] = low, high
    return given
