"""Table of the protocols by which papers sample for their FIDs: supported networks, sampler, steps and guidance.

All protocols draw labels at random and do not clip. The scale of guidance is from the best published FID. Names of
results contain the scale, so sampling with another scale, such as 1 for no guidance, still follows the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from uvit_decay.diffusion.noise_path import GVP, VP, DDPMLinear, Linear, NoisePath, SDDiscrete
from uvit_decay.diffusion.sampling import DiffusionModel, Sampling
from uvit_decay.terminal.errors import UserError, check_choice
from uvit_decay.terminal.typed import check_types

GUIDED = 3  # number of first channels that SiT and DiT guide
UVIT_GUIDANCE = {(4, 32): 1.4, (4, 64): 1.7}  # by (channels, size) of latents: ImageNet 256 and 512


@dataclass(frozen=True)
class SamplingProtocol:
    """Entry of the table of protocols: the supported noise paths, and the sampling of a network."""

    paths: tuple[type[NoisePath], ...]
    sampling: Callable[[DiffusionModel], Sampling]


def _uvit(model: DiffusionModel) -> Sampling:
    """Return the sampling of U-ViT's configurations (their scale of guidance plus 1)."""
    channels, size, _ = model.shape
    if channels == 3 and size in (32, 64) and not model.num_classes:
        return Sampling("uvit-em", 1000, clip=False)
    sampler = "uvit-dpm++" if isinstance(model.path, SDDiscrete) else "uvit-dpm"
    guidance = UVIT_GUIDANCE.get((channels, size), 1.0)
    return Sampling(sampler, 50, guidance, clip=False)


_SIT = Sampling("sit-sde", 250, 1.5, clip=False, guidance_channels=GUIDED)
_DIT = Sampling("dit-ddpm", 250, 1.5, clip=False, guidance_channels=GUIDED)

SAMPLING_PROTOCOLS: dict[str, SamplingProtocol] = {
    "sit": SamplingProtocol((Linear, GVP), lambda model: _SIT),
    "uvit": SamplingProtocol((VP, SDDiscrete), _uvit),
    "dit": SamplingProtocol((DDPMLinear,), lambda model: _DIT),
}


@check_types
def protocol_sampling(name: str, model: DiffusionModel, guidance: float | None = None) -> Sampling:
    """Return the sampling of a protocol for this network; without guidance if it cannot be guided.

    Args:
        name: a name in `SAMPLING_PROTOCOLS`.
        model: the network with its noise path.
        guidance: scale of guidance; None means the published one.
    """
    check_choice(SAMPLING_PROTOCOLS, sampling_protocol=name)
    protocol = SAMPLING_PROTOCOLS[name]
    if not isinstance(model.path, protocol.paths):
        known = " or ".join(path.__name__ for path in protocol.paths)
        raise UserError(f"protocol {name} is for networks on the path {known}, not on {type(model.path).__name__}")
    sampling = model.unguided(protocol.sampling(model))
    if guidance is not None:
        sampling = replace(sampling, guidance=guidance)
    if sampling.guidance == 1.0 or model.shape[0] <= GUIDED:
        return replace(sampling, guidance_channels=None)
    return sampling


def mark_protocol(name: str, model: DiffusionModel, sampling: Sampling) -> str:
    """Return the name of a protocol for results of `sampling`, with changed options, such as `sit-other-steps`.

    Scale of guidance and precision do not count as changes, because names of results contain them anyway.
    """
    published = protocol_sampling(name, model, sampling.guidance)
    guided = sampling.guidance != 1.0
    changed = {
        "sampler": sampling.sampler != published.sampler,
        "steps": sampling.num_steps != published.num_steps,
        "clip": model.clips(sampling) != model.clips(published),
        "guidance-channels": guided and sampling.guidance_channels != published.guidance_channels,
        "guidance-interval": guided and sampling.guidance_interval is not None,
    }
    others = [option for option, is_changed in changed.items() if is_changed]
    if not others:
        return name
    return "-".join([name, "other", *others])
