"""Environment variables by which a launcher tells a process its place among the others; reading them needs no torch."""

from __future__ import annotations

import os

from uvit_decay.runtime.errors import UserError

# Variables of torchrun, srun and Lightning that hold a whole number. Lightning reads some of them when it is imported.
NUMBERS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)


def check_launcher_variables() -> None:
    """Raise a UserError if an environment variable of a launcher does not hold the whole number that it stands for."""
    for name in NUMBERS:
        text = os.environ.get(name)
        if text is not None and not text.isdecimal():
            raise UserError(
                f"the environment variable {name} must be a whole number, got {text!r}: correct or unset it"
            )
