"""Samples at a fixed number of evaluations: ODE and SDE, with and without guidance, beside plain loops."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import networks
from benchmarks.cases import Agreement, Case, Compared, Setting
from benchmarks.measuring import Run, model_flops
from benchmarks.plain import sampling as plain
from uvit_decay.diffusion.noise_path import VP, Linear
from uvit_decay.diffusion.sampling import DiffusionModel, Sampling, generate
from uvit_decay.nn import SiT, UViT
from uvit_decay.nn.sizes import create_model
from uvit_decay.runtime.random import normal

TOLERANCES = {"float32": 1e-3, "tf32": 2e-2, "bf16": 0.1}  # of the samples, relative to their norm
LOOPS = {"ddim": plain.ddim, "sit-ode": plain.heun, "sit-sde": plain.euler_maruyama}


@dataclass(frozen=True)
class Size:
    """A sampling to measure: network, batch, and the samplings with their names."""

    name: str
    net: UViT | SiT
    batch: int
    samplings: tuple[Sampling, ...]


def sizes(setting: Setting) -> Iterator[Size]:
    """Yield U-ViTs with DDIM, and a SiT with its ODE and its SDE."""
    few = setting.size(cpu=4, gpu=24, quick=2)
    ddim, ode, sde = Sampling("ddim", few, clip=False), Sampling("sit-ode", few // 2), Sampling("sit-sde", few)
    uvit, sit = (ddim, replace(ddim, guidance=1.4)), (ode, sde, replace(sde, guidance=1.5))
    if setting.quick:
        yield Size("uvit", UViT(8, 2, 3, 32, 2, 2, num_classes=10, alpha_min=0.7), 2, uvit)
        yield Size("sit", networks.tiny_sit(), 2, sit)
        return
    yield Size("width 64, 18 tokens", networks.small(64, num_classes=10), setting.size(16, 256, 2), uvit)
    s = create_model("uvit-s/2", 0.7, image_size=32, channels=3, num_classes=10)
    yield Size("uvit-s/2", s, setting.size(2, 128, 2), uvit)
    size = setting.size(cpu=0, gpu=1, quick=0)
    name = ("sit-s/2", "sit-xl/2")[size]
    yield Size(name, create_model(name, 0.8, num_classes=1000, wiring="decayed"), setting.size(2, 32, 2), sit)


def cases(setting: Setting) -> Iterator[Case]:
    """Yield a case for each network and sampling."""
    for size in sizes(setting):
        net, reference = (side.eval() for side in networks.both(size.net, setting))
        fast = model_of(networks.compiled(deepcopy(net)), setting.device) if setting.compiled else None
        for sampling in size.samplings:
            yield sampling_case(size, sampling, model_of(net, setting.device), fast, reference)


def model_of(net: UViT | SiT, device: torch.device) -> DiffusionModel:
    """Return the denoiser of the network: eps on U-ViT's path, the velocity on SiT's."""
    if isinstance(net, SiT):
        return DiffusionModel.from_net(net, Linear(), "velocity", device, pixels=False)
    return DiffusionModel.from_net(net, VP(), "eps", device)


def ours(model: DiffusionModel, sampling: Sampling, batch: int) -> Tensor:
    """Return the samples 0, 1, ... of seed 0."""
    labels = [i % model.num_classes for i in range(batch)]
    return generate(model, sampling, range(batch), labels, 0)


@torch.no_grad()
def theirs(model: DiffusionModel, reference: nn.Module, sampling: Sampling, batch: int, same_noise: bool) -> Tensor:
    """Return the samples of a plain loop; with `same_noise` it starts from ours, otherwise from torch's generator."""
    rows = torch.arange(batch, device=model.device)
    y = rows % model.num_classes

    def draw(*key: str | int) -> Tensor:
        if same_noise:
            return normal(*key, rows=rows, shape=model.shape)
        return torch.randn(batch, *model.shape, device=model.device)

    scale = 999.0 if isinstance(model.net, UViT) else 1.0
    field = plain.guided(reference, y, model.num_classes, sampling.guidance, scale)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=sampling.precision == "bf16"):
        loop = LOOPS[sampling.sampler]
        return loop(field, draw("sample", 0), sampling.num_steps, lambda i: draw("sample step", 0, i))


def agreement(model: DiffusionModel, reference: nn.Module, sampling: Sampling) -> Agreement:
    """Return how far two samples of both sides are apart; the plain loop knows no TF32."""
    exact = replace(sampling, precision="float32") if sampling.precision == "tf32" else sampling
    wanted = theirs(model, reference, exact, 2, same_noise=True)
    off = (ours(model, sampling, 2) - wanted).norm() / wanted.norm()
    return Agreement(off.item(), TOLERANCES[sampling.precision])


def sampling_case(
    size: Size, sampling: Sampling, model: DiffusionModel, compiled: DiffusionModel | None, reference: nn.Module
) -> Case:
    """Compare in float32, in bf16, and our default precision with a plain loop in float32."""
    default = model.in_precision(sampling).precision
    exact = {precision: replace(sampling, precision=precision) for precision in ("float32", "bf16", default)}
    agreed = {precision: agreement(model, reference, each) for precision, each in exact.items()}
    runs: dict[str, Run] = {p: partial(ours, model, each, size.batch) for p, each in exact.items()}
    compared = []
    for p in ("float32", "bf16"):
        runs[f"plain {p}"] = partial(theirs, model, reference, exact[p], size.batch, same_noise=False)
        compared.append(Compared(p, p, f"plain {p}", agreed[p], rate=p))
        if compiled is not None:
            runs[f"{p} compiled"] = partial(ours, compiled, exact[p], size.batch)
            compared.append(replace(compared[-1], ours=f"{p} compiled", compiled=True))
    rate = "bf16" if default == "bf16" else "float32"
    compared.append(Compared(f"default ({default})", default, "plain float32", agreed[default], rate=rate))
    guided = f", w {sampling.guidance:g}" if sampling.guidance != 1 else ""
    name = f"sample {size.name}, {sampling.sampler}, NFE {sampling.nfe}{guided}"
    held = dict.fromkeys(runs, sum(4 * p.numel() for p in size.net.parameters()))
    return Case(name, size.batch, runs, compared, 7, flops(size.net, sampling, size.batch), held)


def flops(net: UViT | SiT, sampling: Sampling, batch: int) -> int:
    """Return the FLOPs of the evaluations that the sampler needs, two forward passes each with guidance."""
    with torch.device("meta"):
        reference = networks.plain_of(net)
        x, t = torch.empty(batch, net.channels, net.image_size, net.image_size), torch.empty(batch)
        y = torch.zeros(batch, dtype=torch.int64)
        forward = model_flops(lambda: reference(x, t, y))
    return forward * sampling.nfe * (1 if sampling.guidance == 1.0 else 2)
