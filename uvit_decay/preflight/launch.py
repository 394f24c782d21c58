"""Does the launcher start as many processes as the flags say?

torchrun sets WORLD_SIZE, srun SLURM_STEP_NUM_TASKS; Lightning alone starts the processes of its node itself, and knows
the others by MASTER_ADDR, MASTER_PORT and NODE_RANK.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from uvit_decay.preflight.plan import Run
from uvit_decay.preflight.report import Finding
from uvit_decay.runtime.program import localised

INTERACTIVE = ("bash", "interactive")  # names of SLURM jobs in which Lightning does not look for srun
HERE = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class _Claim:
    """A variable, and the number that it ought to have by the flags."""

    name: str
    expected: int


def launch(run: Run) -> Iterator[Finding]:
    """Compare --trainer.devices and --trainer.num_nodes with the variables of the launcher."""
    yield from variables(run.trainer.num_devices, run.trainer.num_nodes, os.environ)


def variables(devices: int, nodes: int, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings for so many `devices` on each of `nodes`."""
    name, claims = _launcher(devices, nodes, environ)
    product = f"--trainer.devices {devices} x --trainer.num_nodes {nodes} = {devices * nodes}"
    wrong = [claim for claim in claims if _number(environ, claim.name) not in (None, claim.expected)]
    for claim in wrong:
        text = f"{claim.name}={environ[claim.name]}, by the flags {claim.expected} ({product})"
        yield Finding("error", "ranks", text, _flags(environ, name) or f"unset {claim.name}")
    others = list(_without_launcher(nodes, environ)) if name == "Lightning" else list(_of_slurm(name, environ))
    yield from others
    if not wrong and all(finding.level != "error" for finding in others):
        seen = [f"{claim.name}={environ[claim.name]}" for claim in claims if claim.name in environ]
        count = f"{devices * nodes} = {nodes} node{'s' * (nodes > 1)} x {devices}"
        yield Finding("ok", "ranks", f"{count}, started by {name}" + (f" ({', '.join(seen)})" if seen else ""))


def _launcher(devices: int, nodes: int, environ: Mapping[str, str]) -> tuple[str, list[_Claim]]:
    """Return who starts the ranks, as Lightning finds it, and what its variables ought to say."""
    ranks = devices * nodes
    if "TORCHELASTIC_RUN_ID" in environ:  # SLURM_NTASKS counts the agents of torchrun, then, not the ranks
        numbers = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": devices, "GROUP_WORLD_SIZE": nodes}
        return "torchrun", [_Claim(*pair) for pair in numbers.items()]
    if "SLURM_NTASKS" in environ and environ.get("SLURM_JOB_NAME") not in INTERACTIVE:
        numbers = {"SLURM_NTASKS": ranks, "SLURM_STEP_NUM_TASKS": ranks}
        numbers |= {"SLURM_NTASKS_PER_NODE": devices, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NNODES": nodes}
        return "srun", [_Claim(*pair) for pair in numbers.items()]
    return "Lightning", [_Claim("WORLD_SIZE", ranks)]


def _of_slurm(name: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    if name == "srun" and "SLURM_STEP_NUM_TASKS" not in environ:
        text = f"SLURM_NTASKS={environ['SLURM_NTASKS']} but no SLURM_STEP_NUM_TASKS: srun has not started this program"
        yield Finding("error", "ranks", text, localised("srun python train.py ..., or --job-name interactive"))


def _without_launcher(nodes: int, environ: Mapping[str, str]) -> Iterator[Finding]:
    if nodes == 1:
        return
    for variable in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        if not environ.get(variable):
            hint = "the same on all nodes" if variable != "NODE_RANK" else f"0 to {nodes - 1}"
            yield Finding(
                "error", "ranks", f"{nodes} nodes without a launcher, and no {variable}", f"{variable}: {hint}"
            )
    rank = _number(environ, "NODE_RANK")
    if rank is not None and not 0 <= rank < nodes:
        yield Finding("error", "ranks", f"NODE_RANK={rank} of {nodes} nodes", f"NODE_RANK 0 to {nodes - 1}")
    if environ.get("MASTER_ADDR") in HERE:
        text = f"MASTER_ADDR={environ['MASTER_ADDR']} is every node's own address"
        yield Finding("warning", "ranks", text, "MASTER_ADDR: the address of the first node")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable; SLURM writes 2(x3) for two on each of three nodes. None: unset, or no number."""
    word = environ.get(name, "").partition("(")[0]
    return int(word) if word.isdecimal() else None


def _flags(environ: Mapping[str, str], launcher: str) -> str:
    """Return the flags with which the launcher would agree."""
    names = {"torchrun": ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), "srun": ("SLURM_NTASKS_PER_NODE", "SLURM_NNODES")}
    devices, nodes = (_number(environ, name) for name in names.get(launcher, ("", "")))
    flags = {"--trainer.devices": devices, "--trainer.num_nodes": nodes}
    return " ".join(f"{flag} {number}" for flag, number in flags.items() if number)
