"""Table of the samplers; each is a generator that yields (t, x_t) after every step and ends at t = 0.

Entries of SAMPLERS take a denoiser, x_1, the number of steps, and a function that draws the noise of step 0, 1, ... .
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from uvit_decay.diffusion.denoiser import Denoiser, Noise, Trajectory
from uvit_decay.diffusion.multistep import dpm_solver
from uvit_decay.diffusion.noise_path import Interpolant, NoisePath
from uvit_decay.diffusion.ode import T_MIN, ddim, ddpm, dopri5, euler, heun, heun_throughout
from uvit_decay.diffusion.sde import SDE
from uvit_decay.diffusion.singlestep import dpm_solver_fast, dpm_solver_plus_fast
from uvit_decay.runtime.errors import UserError


@dataclass(frozen=True)
class Sampler:
    """Entry of the table of samplers.

    Args:
        run: yields the trajectory.
        nfe: number of steps -> network evaluations for each sample; None for adaptive samplers.
        stochastic: the steps draw noise.
        steps: the default number of steps.
        sde: the SDE that is integrated, for samplers that offer a choice.
        per_sample: the denoiser is called with one sample at a time.
        noisy_start: the log-SNR must be finite at t = 1.
        paper: the sampler of a paper: by default, nothing is clipped and evaluations draw labels at random.
    """

    run: Callable[[Denoiser, Tensor, int, Noise], Trajectory]
    nfe: Callable[[int], int | None]
    stochastic: bool
    steps: int
    sde: SDE | None = None
    per_sample: bool = False
    noisy_start: bool = False
    paper: bool = False

    def check(self, path: NoisePath) -> None:
        """Raise a UserError if this sampler is not defined on `path`."""
        if self.sde:
            self.sde.check(path)
        if self.noisy_start and isinstance(path, Interpolant):
            raise UserError(f"the log-SNR is infinite at t = 1 on the path {type(path).__name__}: use sampler dpm++")


def _one_each(steps: int) -> int:
    return steps


def _two_but_the_last(steps: int) -> int:
    return 2 * steps - 1


def _two_each(steps: int) -> int:
    return 2 * steps


def _adaptive(steps: int) -> None:
    return None


def sde_sampler(sde: SDE, steps: int, paper: bool = False) -> Sampler:
    """Return the sampler that integrates `sde`."""
    return Sampler(sde.run, sde.nfe, True, steps, sde, paper=paper)


SAMPLERS: dict[str, Sampler] = {
    # name               trajectory  evaluations  stochastic  default steps
    "dpm++": Sampler(dpm_solver, _one_each, False, 25),
    "ddim": Sampler(ddim, _one_each, False, 25),
    "ddpm": Sampler(ddpm, _one_each, True, 25),
    "euler-maruyama": sde_sampler(SDE("sbdm", last_time=T_MIN), 25),
    "euler": Sampler(euler, _one_each, False, 25),
    "heun": Sampler(heun, _two_but_the_last, False, 25),
    "dopri5": Sampler(dopri5, _adaptive, False, 1, per_sample=True),
    # The samplers of the papers
    "sit-ode": Sampler(heun_throughout, _two_each, False, 125, paper=True),
    "sit-sde": sde_sampler(SDE(), 250, paper=True),
    "sit-sde-heun": sde_sampler(SDE(heun=True), 125, paper=True),
    "uvit-dpm": Sampler(dpm_solver_fast, _one_each, False, 50, noisy_start=True, paper=True),
    "uvit-dpm++": Sampler(dpm_solver_plus_fast, _one_each, False, 50, noisy_start=True, paper=True),
}
SAMPLERS["uvit-em"] = replace(SAMPLERS["euler-maruyama"], steps=1000, paper=True)
