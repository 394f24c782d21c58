"""Images that a network generates, addressed by index: for files, evaluation, previews and metrics while training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from uvit_decay.autoencoder import decoder
from uvit_decay.checkpoint import Checkpoint, load
from uvit_decay.checkpoint.io import weights_file
from uvit_decay.diffusion.denoiser import CompiledNet, NFECounter
from uvit_decay.diffusion.protocols import marked_protocol, protocol_sampling
from uvit_decay.diffusion.sampling import DiffusionModel, Sampling, generate_uint8
from uvit_decay.guide import Guide
from uvit_decay.image_io import to_uint8
from uvit_decay.runtime.distributed import cpu_threads, pick_device
from uvit_decay.runtime.random import uniform
from uvit_decay.sampling_options import SamplingOptions

TINY = 5_000_000  # parameters
PATHS = ("checkpoint", "guide")  # keys of the metadata that may differ: checksums identify these files


@dataclass
class Samples:
    """An unbounded sequence of samples; sample i depends only on (network, seed, i, label of i).

    Args:
        model: the network with its noise path and perhaps a guide, in eval mode, on the sampling device.
        sampling: sampler and its settings.
        weights: name of the weights, ema or raw.
        classes: classes of the images; empty for an unconditional network.
        at_random: whether classes are drawn at random, rather than taken in turn.
        seed: seed of noise and random labels.
        decode: function from the float samples of the network to uint8 images.
        shape: (c, h, w) of an image; None means that of the network.
        vae: hub id or folder of the autoencoder that decodes latents; None for pixels.
        checkpoint: contents of the checkpoint; None for a network in training.
        file: path of the checkpoint.
        compiled: whether torch.compile makes the network faster, after a minute or so, and for any batch size.
        protocol: protocol of a paper by which `sampling` was chosen; None if it was not.
        guide: checkpoint of the guide of `model`; None without autoguidance.
    """

    model: DiffusionModel
    sampling: Sampling
    weights: str
    classes: Sequence[int] = ()
    at_random: bool = False
    seed: int = 0
    decode: Callable[[Tensor], Tensor] = to_uint8
    shape: tuple[int, int, int] | None = None
    vae: str | None = None
    checkpoint: Checkpoint | None = None
    file: Path | None = None
    compiled: bool = False
    protocol: str | None = None
    guide: Guide | None = None

    def __post_init__(self) -> None:
        self.shape = self.shape or self.model.shape
        guide = self.model.guide
        if guide is not None:
            guide = replace(guide, net=self._counter(guide))
        self._counted = replace(self.model, net=self._counter(self.model), guide=guide)

    def _counter(self, model: DiffusionModel) -> NFECounter:
        """Return the network of a model, compiled if asked for, with a counter of its evaluations."""
        return NFECounter(CompiledNet(model.net) if self.compiled else model.net)

    @classmethod
    def from_options(cls, file: Path, options: SamplingOptions, local_rank: int = 0) -> Samples:
        """Load a checkpoint and apply the options; without a device among them, use GPU number `local_rank`.

        Raises:
            UserError: the checkpoint cannot be read, or does not support the options.
        """
        checkpoint = load(file, options.weights, options.trust)
        model = checkpoint.source(pick_device(options.device, local_rank))
        guide = Guide.from_options(file, options)
        if guide is not None:
            model = replace(model, guide=guide.checkpoint.source(model.device))
        if protocol := options.sampling_protocol:
            recommended = protocol_sampling(protocol, model, options.guidance)
        else:
            recommended = model.unguided(checkpoint.card.sampling)
        if guide is not None:  # the checkpoint's own channels and interval are for guidance by the null label
            recommended = replace(recommended, guidance_channels=None, guidance_interval=None)
        sampling = recommended.changed(**options.changes())
        model.check(sampling)
        if guide is not None:
            guide.check(checkpoint.card)
        sampling = model.in_precision(sampling)
        classes = options.chosen_classes(checkpoint.card.class_names)
        by_paper = sampling.method.paper or protocol is not None
        at_random = by_paper if options.labels is None else options.labels == "random"
        samples = cls(model, sampling, checkpoint.card.weights, classes, at_random, options.seed)
        samples = replace(samples, checkpoint=checkpoint, file=weights_file(file), protocol=protocol, guide=guide)
        autoencoder = decoder(checkpoint.card.latents, options.vae, model.device)
        if autoencoder is None:
            return samples
        shape = (3, *(side * autoencoder.space.factor for side in model.shape[1:]))
        return replace(samples, decode=autoencoder.decode, shape=shape, vae=autoencoder.space.vae)

    def images(self, indices: Sequence[int]) -> Tensor:
        """Return the samples with these indices, in one batch: uint8 (b, c, h, w) on the sampling device."""
        tiny = self.model.device.type == "cpu" and self.model.pixels
        tiny = tiny and sum(parameter.numel() for parameter in self.model.net.parameters()) < TINY
        with cpu_threads(1 if tiny else None):  # more are up to 3 times slower on a busy machine
            return generate_uint8(self._counted, self.sampling, indices, self.labels(indices), self.seed, self.decode)

    def labels(self, indices: Sequence[int]) -> list[int] | None:
        """Return the classes of samples i, functions of (seed, i) alone; None for an unconditional network."""
        if not self.classes:
            return None
        places = torch.tensor(indices, dtype=torch.int64, device="cpu")
        if self.at_random:
            places = (uniform("label", self.seed, rows=places).double() * len(self.classes)).long()
        return [self.classes[place] for place in (places % len(self.classes)).tolist()]

    @property
    def nfe(self) -> int:
        """Network evaluations of this process so far, per image; a guided step counts twice, by a guide, too."""
        guide = self._counted.guide
        return self._counted.net.nfe + (0 if guide is None else guide.net.nfe)

    def metadata(self) -> dict[str, Any]:
        """Return everything that the images depend on, as plain values."""
        origin = {}
        if self.checkpoint is not None:
            card = self.checkpoint.card
            origin = {"checkpoint": str(self.file), "step": card.step, "data": card.data, "vae": self.vae}
        protocol = {} if self.protocol is None else {"sampling_protocol": self._marked_protocol()}
        guide = {} if self.guide is None else self.guide.metadata()
        return {
            **origin,
            **guide,
            **protocol,
            "weights": self.weights,
            **self.sampling.metadata(),
            "clip": self.model.clips(self.sampling),
            "seed": self.seed,
            "labels": self._labels_in_words(),
        }

    @property
    def name(self) -> str:
        """A short name for keys and file names, such as `ema_dpm++25_w2_seed0`."""
        protocol = [] if self.protocol is None else [f"protocol-{self._marked_protocol()}"]
        guide = [] if self.guide is None else [self.guide.name(self.weights)]
        parts = [self.weights, *protocol, self.sampling.name, *guide, f"seed{self.seed}"]
        if self.classes and self.at_random:
            parts.append("random-labels")
        if not self._all_classes():
            listed = "-".join(map(str, self.classes))
            few = len(self.classes) <= 10
            parts.append(f"classes{listed}" if few else f"{len(self.classes)}classes-{crc32(listed.encode()):08x}")
        if self.vae and self.vae != self.checkpoint.card.latents.vae:
            parts.append(f"vae-{Path(self.vae).name}")
        return "_".join(parts)

    def _marked_protocol(self) -> str:
        """Return the protocol with what was changed of it; labels in turn are a change, too."""
        balanced = "-balanced" if self.classes and not self.at_random else ""
        return marked_protocol(self.protocol, self.model, self.sampling) + balanced

    def _all_classes(self) -> bool:
        return list(self.classes) == list(range(self.model.num_classes))

    def _labels_in_words(self) -> str | None:
        """Return a phrase such as "all 10 classes in turn"; None for an unconditional network."""
        if not self.classes:
            return None
        listed = ",".join(map(str, self.classes))
        shown = f"all {len(self.classes)} classes" if self._all_classes() else f"classes {listed}"
        return f"{shown} {'at random' if self.at_random else 'in turn'}"
