"""Table of the samplers; each is a generator that yields (t, x_t) after every step and ends at t = 0.

Entries of SAMPLERS take a denoiser, x_1, the number of steps, and a function that returns the noise of step 0, 1, ... .
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from uvit_decay.diffusion.denoiser import Denoiser, Noise, Trajectory
from uvit_decay.diffusion.dpm_solver import dpm_solver, dpm_solver_fast, dpm_solver_plus_fast
from uvit_decay.diffusion.noise_path import DDPMLinear, Interpolant, NoisePath
from uvit_decay.diffusion.ode import ddim, ddpm, dit_ddpm, dopri5, euler, heun, heun_throughout
from uvit_decay.diffusion.prediction import T_EPS
from uvit_decay.diffusion.sde import SDE
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import check_types


@check_types
@dataclass(frozen=True)
class Sampler:
    """Entry of the table of samplers.

    Args:
        run: generator of the trajectory.
        steps: default number of steps.
        evaluations: network evaluations per step; None for adaptive samplers, which integrate one sample at a time.
        single_last: whether the last step takes one evaluation.
        stochastic: whether the steps add noise.
        sde: the SDE to integrate, for samplers that offer a choice.
        noisy_start: whether the log-SNR must be finite at t = 1.
        learned_variance: whether the network must return a learned variance, on the levels of `DDPMLinear`.
        fewest: smallest number of steps.
        paper: whether it is the sampler of a paper. By default it does not clip, and evaluations draw labels at random.
    """

    run: Callable[[Denoiser, Tensor, int, Noise], Trajectory]
    steps: int
    evaluations: int | None = 1
    single_last: bool = False
    stochastic: bool = False
    sde: SDE | None = None
    noisy_start: bool = False
    learned_variance: bool = False
    fewest: int = 1
    paper: bool = False

    def nfe(self, steps: int) -> int | None:
        """Return the network evaluations (NFE) of `steps` steps for each sample; None if the sampler is adaptive."""
        if self.evaluations is None:
            return None
        return self.evaluations * (steps - self.single_last) + self.single_last

    def check(self, path: NoisePath, name: str) -> None:
        """Raise a UserError if this sampler, which `name` names, is not defined on `path`."""
        where = f"sampler {name} is not defined on the path {type(path).__name__}"
        if self.sde and self.sde.form == "sbdm" and isinstance(path, Interpolant):
            raise UserError(f"{where}, where g^2 / 2 (sbdm) is infinite at t = 1: use sampler sit-sde")
        if self.noisy_start and isinstance(path, Interpolant):
            raise UserError(f"{where}, where the log-SNR is infinite at t = 1: use sampler dpm++")
        if self.learned_variance and not isinstance(path, DDPMLinear):
            raise UserError(f"{where}, only on the levels of DDPMLinear: use sampler ddpm")


@check_types
def sde_sampler(sde: SDE, steps: int, paper: bool = False) -> Sampler:
    """Return the sampler that integrates `sde`."""
    evaluations = 2 if sde.heun else 1
    single_last = sde.last_step != "none"
    return Sampler(sde.run, steps, evaluations, single_last, stochastic=True, sde=sde, paper=paper)


_REVERSE = SDE("sbdm", last_time=T_EPS)  # the reverse SDE of Song et al. (2021) on U-ViT's grid

SAMPLERS: dict[str, Sampler] = {
    # name               trajectory, default steps, evaluations of a step
    "dpm++": Sampler(dpm_solver, 25),
    "ddim": Sampler(ddim, 25),
    "ddpm": Sampler(ddpm, 25, stochastic=True),
    "euler-maruyama": sde_sampler(_REVERSE, 25),
    "euler": Sampler(euler, 25),
    "heun": Sampler(heun, 25, 2, single_last=True),
    "dopri5": Sampler(dopri5, 1, None),
    # The samplers of the papers, with a FID that the paper's authors report for this sampler (not measured here):
    # 50,000 samples of classes drawn at random, guidance w.
    "sit-ode": Sampler(heun_throughout, 125, 2, paper=True),  # NFE 250: ImageNet-256 SiT-XL/2, w 1: about 9.5
    "sit-sde": sde_sampler(SDE(), 250, paper=True),  # NFE 250: ImageNet-256 SiT-XL/2, w 1: 8.3; w 1.5: 2.06
    "sit-sde-heun": sde_sampler(SDE(heun=True), 125, paper=True),  # NFE 249: an option of SiT's code, no FID
    "uvit-dpm": Sampler(dpm_solver_fast, 50, noisy_start=True, paper=True),  # ImageNet-256 L/2, w 1.4: 3.40
    "uvit-dpm++": Sampler(dpm_solver_plus_fast, 50, noisy_start=True, paper=True),  # ImageNet-256 H/2, w 1.4: 2.29
    "uvit-em": sde_sampler(_REVERSE, 1000, paper=True),  # CIFAR-10 U-ViT-S/2, unconditional: 3.11
    # NFE 250: ImageNet-256 DiT-XL/2 after 400k steps, w 1: 18.1 (PyTorch), 19.5 (JAX)
    "dit-ddpm": Sampler(dit_ddpm, 250, stochastic=True, learned_variance=True, fewest=2, paper=True),
}
