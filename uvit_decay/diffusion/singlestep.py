"""Singlestep DPM-Solver-3 and DPM-Solver++ of Lu et al. (2022) as U-ViT runs them ("fast"), from t = 1 to almost 0.

Not diffusers' DPMSolverSinglestepScheduler: it asks at whole timesteps of 1000 only, takes its last step to t = 0 at
first order, and has no noise prediction that is not deprecated.
"""

from __future__ import annotations

from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from uvit_decay.diffusion.flow import Flow, Noise, Trajectory, linspace
from uvit_decay.diffusion.path import LEVELS, Path

LAST_TIME = 1e-4  # the state at this time is the image


def dpm_solver_fast(flow: Flow, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """DPM-Solver on noise predictions, its steps equal in log-SNR; `steps` network evaluations."""
    orders = _orders(steps)
    ends = torch.tensor([flow.high, LAST_TIME], dtype=torch.float64, device="cpu")
    grid = linspace(*_log_snr(flow.path, ends).tolist(), len(orders) + 1)
    inner = [linspace(*pair, order + 1)[:-1] for pair, order in zip(pairwise(grid), orders, strict=True)]
    yield from _run(flow, x, _times(flow.path, [*chain(*inner), grid[-1]]), orders, of_data=False)


def dpm_solver_plus_fast(flow: Flow, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """DPM-Solver++ on data predictions, equal steps in time down to SD's first level; `steps` network evaluations."""
    yield from _run(flow, x, linspace(flow.high, 1 / LEVELS, steps + 1), _orders(steps), of_data=True)


def _orders(steps: int) -> list[int]:
    """Orders of steps that take `steps` evaluations: as many of the third as leave some of lower order for the end."""
    last = {0: [2, 1], 1: [1], 2: [2]}[steps % 3]
    return [3] * ((steps - sum(last)) // 3) + last


def _log_snr(path: Path, t: Tensor) -> Tensor:
    """Half of it: log(alpha_t / sigma_t)."""
    return (path.alpha(t) / path.sigma(t)).log()


def _times(path: Path, log_snrs: list[float]) -> list[float]:
    """The times at which the path has these, by bisection."""
    wanted = torch.tensor(log_snrs, dtype=torch.float64, device="cpu")
    low, high = torch.zeros_like(wanted), torch.ones_like(wanted)
    for _ in range(60):
        middle = (low + high) / 2
        late = _log_snr(path, middle) < wanted
        low, high = torch.where(late, low, middle), torch.where(late, middle, high)
    return high.tolist()


def _run(flow: Flow, x: Tensor, times: list[float], orders: list[int], of_data: bool) -> Trajectory:
    """The trajectory over `times`, in steps that pass as many of them as their order; the last is taken for 0."""
    for end, order in zip(accumulate(orders), orders, strict=True):
        group = times[end - order : end + 1]
        states = _step(flow, x, group, of_data)
        for after, state in zip(group[1:], states, strict=True):
            yield 0.0 if after == times[-1] else after, state
        x = states[-1]


def _step(flow: Flow, x: Tensor, times: list[float], of_data: bool) -> list[Tensor]:
    """The states at all but the first of `times`; the last is of order len(times) - 1, those between lead to it.

    With D the noise, and h the gain in log(alpha / sigma), a step is alpha_t / alpha_s x - sigma_t (e^h - 1) D and a
    correction of its order; with D the data, alpha and sigma change places.
    """
    t = torch.tensor(times, dtype=torch.float64, device="cpu")
    kept, added = flow.path.alpha(t), flow.path.sigma(t)
    if of_data:
        kept, added = added, kept
    gains = (kept / added).log()
    h = (gains - gains[0]).tolist()
    growth = torch.expm1(gains - gains[0]).tolist()
    keep, add = (kept / kept[0]).tolist(), added.tolist()
    states: list[Tensor] = []
    first = flow.split(x, times[0])[1 - of_data]
    for i in range(1, len(times)):
        change = growth[i] * first
        if i > 1:
            bend = growth[i] / 2 if len(times) == 3 else growth[i] / h[i] - 1
            change = change + bend * h[i] / h[i - 1] * (flow.split(states[-1], times[i - 1])[1 - of_data] - first)
        states.append(keep[i] * x - add[i] * change)
    return states
