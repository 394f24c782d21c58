"""A denoiser as a component of a diffusers pipeline: the network, its noise path, its prediction, its latent space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from PIL import Image
from torch import Tensor, nn

from uvit_decay.diffusion.noise_path import GVP, VP, DDPMLinear, Linear, SDDiscrete
from uvit_decay.diffusion.prediction import Prediction
from uvit_decay.diffusion.sampling import DiffusionModel, Sampling, decoding_precision, trajectory
from uvit_decay.diffusion.sde import SDE
from uvit_decay.latents.autoencoder import decode_slices
from uvit_decay.latents.space import LatentSpace
from uvit_decay.nn.base import DecayedNet
from uvit_decay.nn.sit import SiT
from uvit_decay.nn.uvit import UViT
from uvit_decay.pictures import to_pil, to_uint8
from uvit_decay.runtime.precision import computing
from uvit_decay.runtime.random import indices_on, normal
from uvit_decay.terminal.errors import UserError

PATHS = {path.__name__: path for path in (Linear, GVP, VP, SDDiscrete, DDPMLinear)}


class DecayedDenoiser(ModelMixin, ConfigMixin):
    """A network net(x, t, y) with the settings for sampling from it; t in [0, 1], t = 1 is noise (abstract).

    Args:
        network: arguments of the network.
        path: name of the noise path, as entry `name`, and its arguments.
        prediction: quantity that the network predicts.
        latents: fields of the `LatentSpace` of its states; None for pixels.
    """

    kind: ClassVar[type[DecayedNet]]

    @register_to_config
    def __init__(
        self,
        network: dict[str, Any],  # not `net`: diffusers 0.35 returns an entry of its configuration for that name
        path: dict[str, Any],
        prediction: Prediction,
        latents: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.net = self.kind(**network)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, **options: Any) -> Any:
        """Load like any ModelMixin; raise a UserError for weights that do not fit, which diffusers only logs."""
        wanted = options.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, output_loading_info=True, **options)
        for kind, names in info.items():
            if names:
                what = kind.replace("_", " ")
                raise UserError(f"{pretrained_model_name_or_path} does not fit its configuration: {what} {names[0]}")
        # diffusers copies tensors without load_state_dict, in which networks check what they record of their shortcuts
        # and long skips. So each network loads its own weights.
        model.net.load_state_dict(model.net.state_dict())
        return (model, info) if wanted else model

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the output (b, c, h, w), in the network's dtype, for states x, times t (b,) and labels y (b,)."""
        return self.net(x.to(self.dtype), t, y)

    @property
    def space(self) -> LatentSpace | None:
        """The latent space of the states; None for pixels."""
        return self.config.latents and LatentSpace(**self.config.latents)

    def model(self, device: torch.device) -> DiffusionModel:
        """Return this network on `device` in the form that samplers take."""
        # Built at each call: diffusers executes the file of this class again whenever it loads a folder, and the path
        # must be of a class that the functions of the new module know.
        arguments = dict(self.config.path)
        path = PATHS[arguments.pop("name")](**arguments)
        model = DiffusionModel.from_net(self.net, path, self.config.prediction, device, self.space is None)
        return replace(model, net=self)

    def sampling(self, recommended: Mapping[str, Any], device: torch.device, changes: Mapping[str, Any]) -> Sampling:
        """Return the recommended sampling with changes.

        Args:
            recommended: fields of `Sampling`.
            device: device on which to sample; it determines the default precision.
            changes: fields of `Sampling` to replace.
        """
        model = self.model(device)
        sampling = model.unguided(build_sampling(recommended)).changed(**changes)
        model.check(sampling)
        return model.in_precision(sampling)

    def trajectory(
        self, sampling: Sampling, keys: Sequence[tuple[int, int]], labels: Sequence[int] | None, device: torch.device
    ) -> Iterator[Tensor]:
        """Yield the states of a batch after each step, float32 (b, c, h, w).

        Args:
            sampling: returned by `sampling`.
            keys: seed and index of each image, which determine its noise.
            labels: class of each image; None for an unconditional network.
            device: device on which to sample.
        """
        model = self.model(device)
        rows = []
        for seed, group in groupby(keys, key=itemgetter(0)):
            indices = [index for _, index in group]
            rows.append((seed, indices_on(device, indices)))

        def draw(name: str, *step: int) -> Tensor:
            return torch.cat([normal(name, seed, *step, rows=part, shape=model.shape) for seed, part in rows])

        with computing(device, sampling.precision):
            yield from trajectory(model, sampling, labels, draw)

    def images(
        self, states: Tensor, sampling: Sampling, vae: nn.Module | None, output_type: Literal["pil", "np", "pt"]
    ) -> list[Image.Image] | Tensor | np.ndarray:
        """Return the images of final states (b, c, h, w).

        Args:
            states: pixels or latents.
            sampling: determines the precision of decoding.
            vae: autoencoder for latents; None for pixels.
            output_type: "pil": images; "np": array (b, h, w, c) in [0, 1]; "pt": tensor (b, c, h, w) in [0, 1].
        """
        images = states
        if self.space is not None:
            with computing(states.device, decoding_precision(sampling, states.device)):
                images = torch.cat(list(decode_slices(vae, self.space, states, vae.dtype)))
        quantised = to_uint8(images)  # refuses images that are not finite
        if output_type == "pil":
            return [to_pil(image) for image in quantised]
        images = (images.float() / 2 + 0.5).clamp(0, 1)
        if output_type == "pt":
            return images
        return images.permute(0, 2, 3, 1).cpu().numpy()


class UViTDenoiser(DecayedDenoiser):
    """A denoiser whose network is a U-ViT."""

    kind = UViT


class SiTDenoiser(DecayedDenoiser):
    """A denoiser whose network is a SiT."""

    kind = SiT


def build_sampling(values: Mapping[str, Any]) -> Sampling:
    """Return the `Sampling` with these fields, given as `dataclasses.asdict` or JSON writes them."""
    sde = values.get("sde")
    interval = values.get("guidance_interval")
    nested = {"sde": sde and SDE(**sde), "guidance_interval": interval and tuple(interval)}
    return Sampling(**{**values, **nested})
