"""How wrong each sampler is on each path, where the truth is known: a mixture of two Gaussians in the plane.

python -m benchmarks.sampler_error [--size 64]; prints for each path and sampler

    SW      sliced Wasserstein-1 distance of its samples, at its default steps, from exact ones; the floor is that of
            exact samples from others
    error   of a deterministic one, median distance from a fine reference that starts at the same noise, at 20, 40, 80
            and 160 steps; of dopri5, which chooses its steps, one. Not the mean, which a few points near the watershed
            of the two Gaussians decide: they converge later than the rest
    order   how the error falls from 20 steps to the last at which it is above FLOOR, the rounding of diffusers' float32
            noise levels: 1 halves it with the step, 2 quarters it
"""

import argparse
import math

import torch
from torch import Tensor

from uvit_decay.diffusion.denoiser import Denoiser
from uvit_decay.diffusion.noise_path import GVP, VP, Linear, NoisePath, SDDiscrete, expand
from uvit_decay.diffusion.samplers import SAMPLERS
from uvit_decay.runtime.random import normal
from uvit_decay.terminal.errors import UserError

CENTRES = torch.tensor([[-0.6, 0.2], [0.5, -0.3]], dtype=torch.float64)
WEIGHTS = torch.tensor([0.3, 0.7], dtype=torch.float64)
SPREAD = 0.15
PATHS: list[NoisePath] = [VP(), SDDiscrete(), Linear(), GVP()]
STEPS = (20, 40, 80, 160)
REFERENCE = 1000  # Heun steps
FLOOR = 1e-4


def exact(size: int, seed: int) -> Tensor:
    """Float64 (4, 2, size, size): the channels of each pixel are a point of the mixture."""
    random = torch.Generator().manual_seed(seed)
    which = torch.multinomial(WEIGHTS, 4 * size * size, replacement=True, generator=random)
    points = CENTRES[which] + SPREAD * torch.randn(len(which), 2, dtype=torch.float64, generator=random)
    return points.reshape(4, size, size, 2).movedim(-1, 1)


def denoiser(path: NoisePath) -> Denoiser:
    """E[x | x_t] of the mixture, and the noise that belongs to it."""

    def denoise(x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        alpha, sigma = expand(path.alpha(t), x_t), expand(path.sigma(t), x_t)
        variance = alpha**2 * SPREAD**2 + sigma**2
        centres = CENTRES.to(x_t)[:, None, :, None, None]
        offsets = x_t - alpha * centres
        logits = WEIGHTS.to(x_t).log()[:, None, None, None, None] - offsets.square().sum(2, keepdim=True) / (
            2 * variance
        )
        x = (logits.softmax(0) * (centres + alpha * SPREAD**2 / variance * offsets)).sum(0)
        return x, (x_t - alpha * x) / sigma

    return Denoiser(denoise, path)


def noise(path: NoisePath, size: int) -> Tensor:
    """Exact states at t = 1, where SD's schedule still shows the data."""
    x = exact(size, seed=1)
    one = torch.ones(len(x), dtype=x.dtype)
    return path.add_noise(x, torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2)), one)


def final(name: str, path: NoisePath, x: Tensor, steps: int) -> Tensor:
    """The sample that the sampler makes of x."""
    rows = torch.arange(len(x))

    def draw(step: int) -> Tensor:
        return normal("sampler-error", step, rows=rows, shape=x.shape[1:])

    for _, state in SAMPLERS[name].run(denoiser(path), x, steps, draw):
        x = state
    return x


def sliced_wasserstein(a: Tensor, b: Tensor, directions: int = 32) -> float:
    """Mean over directions of the Wasserstein-1 distance of the projections of two equally large sets of points."""
    angles = torch.arange(directions, dtype=a.dtype) * math.pi / directions
    axes = torch.stack([angles.cos(), angles.sin()])
    one, other = ((points.movedim(1, -1).reshape(-1, 2) @ axes).sort(dim=0).values for points in (a, b))
    return (one - other).abs().mean().item()


def distance(a: Tensor, b: Tensor) -> float:
    """Median distance of paired points."""
    return (a - b).norm(dim=1).median().item()


def errors(name: str, path: NoisePath, x: Tensor, reference: Tensor) -> list[float]:
    """Distance from the reference at each of STEPS."""
    return [distance(final(name, path, x, steps), reference) for steps in STEPS]


def order(found: list[float]) -> float:
    """Of the convergence that the errors show."""
    last = max(k for k in range(1, len(found)) if k == 1 or found[k] > FLOOR)
    return math.log(found[0] / found[last]) / math.log(STEPS[last] / STEPS[0])


def sound(name: str, path: NoisePath) -> bool:
    """Whether the sampler takes the path."""
    try:
        SAMPLERS[name].check(path, name)
    except UserError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=32, help="4 size^2 points; default: 32")
    size = parser.parse_args().size
    truth = exact(size, seed=3)
    print(f"{4 * size * size} points, floor of SW {sliced_wasserstein(exact(size, seed=4), truth):.4f}")
    print(f"{'path':11} {'sampler':15} {'steps':>5} {'SW':>7}  {'  '.join(f'{n:>7}' for n in STEPS)}  order")
    for path in PATHS:
        x = noise(path, size)
        reference = final("sit-ode", path, x, REFERENCE)
        for name, sampler in SAMPLERS.items():
            if not sound(name, path):
                print(f"{type(path).__name__:11} {name:15} not sound")
                continue
            off = sliced_wasserstein(final(name, path, x, sampler.steps), truth)
            line = f"{type(path).__name__:11} {name:15} {sampler.steps:5d} {off:7.4f}"
            if sampler.nfe(1) is None:
                line += f"  {distance(final(name, path, x, 1), reference):7.1e}"
            elif not sampler.stochastic:
                found = errors(name, path, x, reference)
                line += "".join(f"  {error:7.1e}" for error in found) + f"  {order(found):5.2f}"
            print(line)


if __name__ == "__main__":
    main()
