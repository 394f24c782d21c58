"""Log-likelihoods of images under a checkpoint, in bits per dimension.

Pixels are whole grey levels, and a density at points can be arbitrarily high. So every pixel is moved to a random place
within its level (uniform dequantisation), which makes the mean an upper bound of the bits that a lossless code takes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from uvit_decay.checkpoint import Checkpoint
from uvit_decay.diffusion.likelihood import bits_per_dim, log_likelihood
from uvit_decay.diffusion.sampling import DiffusionModel
from uvit_decay.evaluation.image_sources import ImageSource
from uvit_decay.evaluation.options import LikelihoodOptions
from uvit_decay.image_io import to_float
from uvit_decay.runtime.distributed import Processes, batches, cpu_threads
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.plain import write_json
from uvit_decay.runtime.precision import chosen_precision, computing
from uvit_decay.runtime.random import indices_on, subset, uniform

LEVEL = 2 / 255  # width of a grey level of pixels in [-1, 1]


@dataclass(frozen=True)
class LikelihoodReport:
    """Bits per dimension of each image, float64 (n,), and how they were computed."""

    bits: Tensor
    metadata: dict[str, Any]

    @property
    def mean(self) -> float:
        """The mean over images."""
        return self.bits.mean().item()

    @property
    def standard_error(self) -> float:
        """The standard error of the mean, of the choice of images, the noise within levels and the random signs."""
        return (self.bits.std() / len(self.bits) ** 0.5).item()

    def save(self, path: Path) -> None:
        """Write mean, standard error and metadata as JSON."""
        content = {"bits_per_dim": self.mean, "standard_error": self.standard_error, "protocol": self.metadata}
        write_json(path, content)


def measure_likelihood(
    checkpoint: Checkpoint,
    images: ImageSource,
    options: LikelihoodOptions,
    device: torch.device,
    processes: Processes,
) -> LikelihoodReport | None:
    """Return the bits per dimension of `images`, on rank 0; the other ranks do their share and return None.

    Args:
        checkpoint: a network of pixels.
        images: images of the size and channels of the network, `open_images(name, net.channels, net.image_size)`.
        options: solver, number of images, labels.
        device: device of the network.
        processes: processes that share the images.
    """
    check_likelihood(checkpoint, images, options)
    chosen = subset(images, options.num, "likelihood")
    model, precision = checkpoint.source(device), chosen_precision(options.precision, device)

    def work(part: range) -> Tensor:
        # A CPU gains nothing from more threads at these sizes, and loses much where it is busy.
        with computing(device, precision), cpu_threads(1 if device.type == "cpu" else None):
            return _bits(model, images, [chosen[i] for i in part], options)

    parts = processes.map_ordered(batches(len(chosen), options.batch_size, processes.size), work)
    if not processes.is_main:
        list(parts)  # yields nothing on this rank, but does its share of the work
        return None
    bits = []
    with tqdm(total=len(chosen), unit="image", desc="likelihood") as bar:
        for part in parts:
            bits.append(part)
            bar.update(len(part))
    about = {
        "step": checkpoint.step,
        "weights": str(checkpoint.weights),
        "images": images.metadata(),
        **asdict(options),
    }
    return LikelihoodReport(torch.cat(bits), about | {"num": len(chosen), "precision": precision})


def check_likelihood(checkpoint: Checkpoint, images: ImageSource, options: LikelihoodOptions) -> None:
    """Raise a UserError if the likelihood of `images` under this checkpoint is not defined."""
    net = checkpoint.net
    if checkpoint.latents:
        raise UserError("bits per dimension are of pixels, this checkpoint makes latents")
    shape = (net.channels, net.image_size, net.image_size)
    if images.shape != shape:
        ours, theirs = ("x".join(map(str, (*s[1:], s[0]))) for s in (shape, images.shape))
        raise UserError(f"{images.name} has images of {theirs}, this checkpoint makes {ours}")
    if len(images) < 2:
        raise UserError(f"{images.name} has one image, a likelihood with its standard error needs two")
    if not net.num_classes:
        return
    if options.labels == "null" and not net.null_label:
        raise UserError("--labels null needs a network that was trained with a null label, this one was not")
    numbered = tuple(map(str, range(len(images.class_names))))  # names of labels that are numbers only
    fit = images.class_names == checkpoint.class_names or images.class_names == numbered[: net.num_classes]
    if options.labels == "own" and (images.labels is None or not fit):
        raise UserError(f"{images.name} does not have the classes of this checkpoint: choose --labels null")


def _bits(model: DiffusionModel, images: ImageSource, indices: list[int], options: LikelihoodOptions) -> Tensor:
    """Return the bits per dimension of the images at `indices`, float64 on the CPU."""
    rows = indices_on(model.device, indices)
    place = uniform("dequantisation", options.seed, rows=rows, shape=model.shape)
    x = to_float(images.read(indices).to(model.device, non_blocking=True)) + LEVEL * (place - 0.5)
    labels = None
    if model.num_classes:
        labels = [model.num_classes] * len(indices)
        if options.labels == "own":
            labels = images.labels[indices].tolist()
    log_density = log_likelihood(model, x, labels, indices, options.seed, options.solver, options.steps)
    return bits_per_dim(log_density.double(), x[0].numel(), LEVEL).cpu()
