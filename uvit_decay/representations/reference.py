"""Features of a reference network, such as DINOv2, of the images that another network is probed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from uvit_decay.image_io import to_float
from uvit_decay.nn.intermediates import pooled
from uvit_decay.representations.alignment import NEIGHBOURS
from uvit_decay.representations.options import Alignment, Probing
from uvit_decay.runtime.distributed import Processes, batches
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.precision import Precision, computing
from uvit_decay.runtime.random import subset
from uvit_decay.sampling_options import LoadingOptions

if TYPE_CHECKING:  # other rooms are known by their interfaces alone
    from uvit_decay.autoencoder import Autoencoder
    from uvit_decay.data import ImageData
    from uvit_decay.representations.networks import Judged


@dataclass(frozen=True)
class Reference:
    """Features, float32 on the CPU, of the test images with the numbers `rows` among those that are probed.

    `about` says whose they are, and is part of reports.
    """

    features: Float[Tensor, "m d"]
    rows: list[int]
    about: Mapping[str, Any]


@dataclass(frozen=True)
class ReferenceNetwork:
    """A reference: its features are the mean of the last layer's patch tokens, after its final norm if it has one.

    Args:
        judged: the network, an encoder.
        device: where it computes.
        precision: of the network.
        batch_size: images at a time on each device.
        autoencoder: what decodes the images of a network of latents; None for pixels.

    Raises:
        UserError: a denoiser.
    """

    judged: Judged
    device: torch.device
    precision: Precision
    batch_size: int
    autoencoder: Autoencoder | None = None

    def __post_init__(self) -> None:
        if not self.judged.is_encoder or self.judged.latents is not None:
            raise UserError(
                f"--reference {self.judged.title}: encoders of clean pictures are references, this is not one"
            )

    def features(self, data: ImageData, chosen: list[int], limit: int, processes: Processes) -> Reference:
        """Extract features of at most `limit` of the `chosen` test images, a fixed random choice, on all processes."""
        rows, net = subset(chosen, limit, "alignment"), self.judged.net.to(self.device)

        @torch.no_grad()
        def work(part: range) -> Tensor:
            stored = data.test[[chosen[row] for row in rows[part.start : part.stop]]][0]
            x = self._enter(data.network_input(stored.to(self.device)))
            with computing(self.device, self.precision):
                *_, tokens = net.forward_intermediates(x)
                norm = dict(net.named_children()).get("norm")
                tokens = tokens if norm is None else norm(tokens)
            return pooled(tokens, "mean", net.num_prefix_tokens).cpu()

        parts = list(processes.map_ordered(batches(len(rows), self.batch_size, processes.size), work))
        found = processes.broadcast(torch.cat(parts) if processes.is_main else None)
        return Reference(found, rows, self._about(len(rows)))

    def _enter(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        """Return pictures in [-1, 1] of the channels and the size that the reference takes, of inputs of a network."""
        net = self.judged.net
        x = x if self.autoencoder is None else to_float(self.autoencoder.decode(x))
        if x.shape[1] != net.channels:
            if x.shape[1] != 1:
                raise UserError(f"--reference {self.judged.title} sees grey images, these have {x.shape[1]} channels")
            x = x.expand(-1, net.channels, -1, -1)
        if x.shape[-1] == net.image_size:
            return x
        return interpolate(x, size=(net.image_size,) * 2, mode="bicubic", antialias=True).clamp(-1, 1)

    def _about(self, count: int) -> dict[str, Any]:
        size, decoded = self.judged.net.image_size, "" if self.autoencoder is None else ", decoded from latents"
        return {
            **self.judged.about,
            "features": "mean of the last layer's patch tokens, after the final norm if there is one",
            "pictures": f"clean, {size} pixels, bicubic with antialias where resized{decoded}",
            "images": count,
            "neighbours": NEIGHBOURS,
        }


def open_reference(
    judged: Judged,
    probing: Probing,
    alignment: Alignment,
    trust: Sequence[str],
    device: torch.device,
    precision: Precision,
) -> ReferenceNetwork | None:
    """Open the reference for a network that is judged by a protocol that aligns; return None for the others.

    Raises:
        UserError: options of a reference for another protocol, or a reference that cannot be one.
    """
    from uvit_decay.autoencoder import decoder
    from uvit_decay.representations.networks import open_network
    from uvit_decay.representations.probe_protocols import PROBE_PROTOCOLS  # which imports this module

    if not PROBE_PROTOCOLS[probing.protocol].aligned:
        if alignment != type(alignment)():
            raise UserError("--reference, --reference-size and --alignment-images are of --protocol repa")
        return None
    network = open_network(alignment.reference, LoadingOptions(trust=trust), alignment.reference_size)
    autoencoder = decoder(judged.latents, None, device) if judged.latents else None
    return ReferenceNetwork(network, device, precision, probing.batch_size, autoencoder)
