"""Images that a network generates, addressed by index: for files, evaluation, previews and training metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import torch
from torch import Tensor

from uvit_decay.checkpoint import Checkpoint, ModelCard, load
from uvit_decay.checkpoint.io import weights_file
from uvit_decay.diffusion.denoiser import CompiledNet, NFECounter
from uvit_decay.diffusion.protocols import mark_protocol, protocol_sampling
from uvit_decay.diffusion.sampling import DiffusionModel, Sampling, generate_uint8
from uvit_decay.generation.guide import Guide
from uvit_decay.generation.options import SamplingOptions
from uvit_decay.latents.autoencoder import decoder
from uvit_decay.pictures import to_uint8
from uvit_decay.runtime.distributed import cpu_threads, pick_device
from uvit_decay.runtime.random import ROWS, list_whole_numbers, uniform
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.program import or_bundled
from uvit_decay.terminal.typed import Bounds, check_types

TINY = 5_000_000  # parameters
VAE_SHA256 = "vae_sha256"  # key of the metadata of images that an autoencoder decoded
PATHS = ("checkpoint", "guide")  # keys of the metadata that may differ: checksums identify these files


@check_types
@dataclass
class Samples:
    """An unbounded sequence of samples; sample i depends only on (network, seed, i, label of i).

    Args:
        model: the network with its noise path and, for autoguidance, a guide, in eval mode, on the sampling device.
        sampling: sampler and its settings.
        weights: name of the weights, ema or raw.
        classes: classes of the images; empty for an unconditional network.
        at_random: whether classes are drawn at random, rather than taken in turn.
        seed: seed of noise and random labels.
        decode: function from the float samples of the network to uint8 images.
        shape: (c, h, w) of an image; None means the shape of the network's images.
        vae: hub id or folder of the autoencoder that decodes latents; None for pixels.
        vae_sha256: fingerprint of the autoencoder's weights; None for pixels.
        checkpoint: contents of the checkpoint; None for a network in training.
        file: path of the checkpoint.
        compiled: compile the network with torch.compile, for any batch size; it takes about a minute.
        protocol: protocol of a paper that gave `sampling`; None without one.
        guide: checkpoint of the guide of `model`; None without autoguidance.
    """

    model: DiffusionModel
    sampling: Sampling
    weights: str
    classes: Sequence[int] = ()
    at_random: bool = False
    seed: Annotated[int, Bounds(0, 2**63 - 1)] = 0
    decode: Callable[[Tensor], Tensor] = to_uint8
    shape: Annotated[tuple[int, int, int] | None, Bounds(1, 2**16)] = None
    vae: str | None = None
    vae_sha256: str | None = None
    checkpoint: Checkpoint | None = None
    file: Path | None = None
    compiled: bool = False
    protocol: str | None = None
    guide: Guide | None = None

    def __post_init__(self) -> None:
        self.classes = list_whole_numbers("classes", self.classes, self.model.num_classes - 1)
        self.shape = self.shape or self.model.shape
        guide = self.model.guide
        if guide is not None:
            guide = replace(guide, net=self._counter(guide))
        self._counted = replace(self.model, net=self._counter(self.model), guide=guide)

    def _counter(self, model: DiffusionModel) -> NFECounter:
        """Return the network of a model, compiled if asked for, with a counter of its evaluations."""
        net = CompiledNet(model.net) if self.compiled else model.net
        return NFECounter(net)

    @classmethod
    def from_options(cls, file: Path, options: SamplingOptions, local_rank: int = 0) -> Samples:
        """Load a checkpoint and apply the options; without a device among them, use GPU number `local_rank`."""
        file = or_bundled(file)
        checkpoint = load(file, options.weights, options.trust)
        card = checkpoint.card
        model = checkpoint.source(pick_device(options.device, local_rank))
        guide = Guide.from_options(file, options)
        if guide is not None:
            model = replace(model, guide=guide.checkpoint.source(model.device))
        sampling = _choose_sampling(model, card, options)
        if guide is not None:
            guide.check(card)
        sampling = model.in_precision(sampling)
        if options.labels is None:
            at_random = sampling.method.paper or options.sampling_protocol is not None
        else:
            at_random = options.labels == "random"
        samples = cls(
            model,
            sampling,
            card.weights,
            classes=options.chosen_classes(card.class_names),
            at_random=at_random,
            seed=options.seed,
            checkpoint=checkpoint,
            file=weights_file(file),
            protocol=options.sampling_protocol,
            guide=guide,
        )
        autoencoder = decoder(card.latents, options.vae, model.device)
        if autoencoder is None:
            return samples
        space = autoencoder.space
        _, height, width = model.shape
        shape = (3, height * space.factor, width * space.factor)
        return replace(samples, decode=autoencoder.decode, shape=shape, vae=space.vae, vae_sha256=space.sha256)

    def images(self, indices: Sequence[int]) -> Tensor:
        """Return the samples with these indices, in one batch: uint8 (b, c, h, w) on the sampling device."""
        on_cpu = self.model.device.type == "cpu" and self.model.pixels
        is_tiny = on_cpu and sum(parameter.numel() for parameter in self.model.net.parameters()) < TINY
        threads = 1 if is_tiny else None  # more threads are up to 3 times slower on a busy machine
        labels = self.labels(indices)
        with cpu_threads(threads):
            return generate_uint8(self._counted, self.sampling, indices, labels, self.seed, self.decode)

    def labels(self, indices: Sequence[int]) -> list[int] | None:
        """Return the classes of samples i, functions of (seed, i) alone; None for an unconditional network."""
        if not self.classes:
            return None
        count = len(self.classes)
        places = torch.tensor(list_whole_numbers("indices", indices, ROWS - 1), dtype=torch.int64, device="cpu")
        if self.at_random:
            numbers = uniform("label", self.seed, rows=places).double()
            places = (numbers * count).long()
        places = places % count
        return [self.classes[place] for place in places.tolist()]

    @property
    def nfe(self) -> int:
        """Network evaluations per image in this process so far; a step with guidance counts twice."""
        nfe = self._counted.net.nfe
        if self._counted.guide is not None:
            nfe += self._counted.guide.net.nfe
        return nfe

    def metadata(self) -> dict[str, Any]:
        """Return everything that the images depend on, as plain values."""
        metadata: dict[str, Any] = {}
        if self.checkpoint is not None:
            card = self.checkpoint.card
            metadata.update(checkpoint=str(self.file), step=card.step, data=card.data, vae=self.vae)
        if self.vae_sha256 is not None:
            metadata[VAE_SHA256] = self.vae_sha256
        if self.guide is not None:
            metadata.update(self.guide.metadata())
        if self.protocol is not None:
            metadata["sampling_protocol"] = self._mark_protocol()
        return {
            **metadata,
            "weights": self.weights,
            **self.sampling.metadata(),
            "clip": self.model.clips(self.sampling),
            "seed": self.seed,
            "labels": self._labels_in_words(),
        }

    def settings(self) -> dict[str, Any]:
        """Return the metadata without the paths of files, which `Processes.check_file` compares."""
        return {key: value for key, value in self.metadata().items() if key not in PATHS}

    @property
    def name(self) -> str:
        """A short name for keys and file names, such as `ema_dpm++25_w2_seed0`."""
        parts = [self.weights]
        if self.protocol is not None:
            parts.append(f"protocol-{self._mark_protocol()}")
        parts.append(self.sampling.name)
        if self.guide is not None:
            parts.append(self.guide.name(self.weights))
        parts.append(f"seed{self.seed}")
        if self.classes and self.at_random:
            parts.append("random-labels")
        if not self._all_classes():
            listed = "-".join(map(str, self.classes))
            if len(self.classes) <= 10:
                parts.append(f"classes{listed}")
            else:
                parts.append(f"{len(self.classes)}classes-{crc32(listed.encode()):08x}")
        if self.vae and self.vae != self.checkpoint.card.latents.vae:
            parts.append(f"vae-{Path(self.vae).name}")
        return "_".join(parts)

    def _mark_protocol(self) -> str:
        """Return the name of the protocol, marked with all changes to it; taking labels in turn is also a change."""
        name = mark_protocol(self.protocol, self.model, self.sampling)
        if self.classes and not self.at_random:
            name += "-balanced"
        return name

    def _all_classes(self) -> bool:
        return list(self.classes) == list(range(self.model.num_classes))

    def _labels_in_words(self) -> str | None:
        """Return a phrase such as "all 10 classes in turn"; None for an unconditional network."""
        if not self.classes:
            return None
        if self._all_classes():
            classes = f"all {len(self.classes)} classes"
        else:
            classes = f"classes {','.join(map(str, self.classes))}"
        order = "at random" if self.at_random else "in turn"
        return f"{classes} {order}"


def _choose_sampling(model: DiffusionModel, card: ModelCard, options: SamplingOptions) -> Sampling:
    """Return the sampling of a protocol or else of the checkpoint, with the changes of the options."""
    if options.sampling_protocol:
        recommended = protocol_sampling(options.sampling_protocol, model, options.guidance)
    else:
        recommended = model.unguided(card.sampling)
    if model.guide is not None:  # the checkpoint's own channels and interval are for guidance by the null label
        recommended = replace(recommended, guidance_channels=None, guidance_interval=None)
    sampling = recommended.changed(**options.changes())
    if sampling.guidance == 1.0:
        for name in ("guidance_interval", "guidance_channels"):
            if getattr(options, name) is not None:
                raise UserError(
                    f"`{name}` has no effect without guidance: set `guidance`, which is 1 here, or leave it out"
                )
    model.check(sampling)
    return sampling
