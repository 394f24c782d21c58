"""Norm and update of every residual branch over training."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.optim import Optimizer

from uvit_decay.callbacks.periodic import record
from uvit_decay.decay import mixing_matrix
from uvit_decay.decay.connection import Connection, State
from uvit_decay.decay.mixing import Merge, MixingSums, depth_reader, mixing_of
from uvit_decay.files.writing import replacing
from uvit_decay.nn.base import DecayedNet
from uvit_decay.plots import heat_maps
from uvit_decay.runs import history
from uvit_decay.runs.folder import run_folder
from uvit_decay.runs.history import BRANCHES
from uvit_decay.runs.loggers import log_picture
from uvit_decay.tasks.base import Task
from uvit_decay.tasks.parallel.sharding import full_tensor
from uvit_decay.terminal.errors import UserError, explain
from uvit_decay.terminal.typed import Positive, check_types

FIGURE = "branches.png"
MIXING = "mixing"  # folder of mixing/step_N.csv in the run folder, and name of mixing.png
TITLES = {  # of the panels of the figure, by name of the values
    "x": "rms of x",
    "f": "rms of beta f",
    "ratio": "their ratio, beta f / x",
    "update": "|dW| / |W| of the last layer",
    "change": "rms of the change of x",  # only of connections that are not numbers
}
TERMS = ("x", "f", "change")


class BranchTerms:
    """Root mean squares of what every branch k of a network reads and writes, in all observed forward passes.

    x_k is what branch k reads, before its norm (in a ResNet the output of its shortcut), and f_k is what it adds to the
    stream, beta_k times its output. A connection that is not numbers has no beta. Then f_k is the output, and change_k
    is the change of the tokens that the connection makes of it. Compiled code runs uncompiled meanwhile, because its
    graphs ignore hooks.
    """

    def __init__(self, net: DecayedNet) -> None:
        self.net = net
        self._has_numbers = net.shortcuts.build is None
        self._observing = ExitStack()
        self._started = False
        self._reset()

    @property
    def sums(self) -> Float[Tensor, "two_terms branches"]:
        """Sums over the forward passes of this process, float32; reading them waits for the device.

        The rows are the sums of the squares of x, of f and, for connections that are not numbers, of the changes, and
        then the numbers of summands in each. Sums of several processes may be added.
        """
        rows = [*self._squares.values(), *self._counts.values()]
        return torch.tensor([list(map(float, row)) for row in rows])

    @property
    def mixing(self) -> Tensor | None:
        """Sums for the mixing matrix over the forward passes of this process, see `MixingSums.sums`.

        None for shortcuts that are not learned, whose matrix does not change.
        """
        if isinstance(self._mixing, MixingSums):
            return self._mixing.sums()
        return self._mixing

    def _reset(self) -> None:
        branches = len(self.net.shortcuts.alphas)
        names = TERMS[:2] if self._has_numbers else TERMS
        self._squares: dict[str, list[Tensor | float]] = {name: [0.0] * branches for name in names}
        self._counts: dict[str, list[int]] = {name: [0] * branches for name in names}
        self._mixing: MixingSums | Tensor | None = None

    def start(self) -> None:
        """Forget earlier forward passes and register the hooks, unless they are registered."""
        if self._started:
            return
        self._started = True
        self._reset()
        self._observing.enter_context(torch.compiler.set_stance("force_eager"))
        for k, (connection, following) in enumerate(pairwise(self.net.connections)):
            handle = connection.register_forward_hook(partial(self._write, k, following))
            self._observing.callback(handle.remove)
        reader = depth_reader(self.net)
        if reader is not None:
            self._mixing = MixingSums(reader, len(self.net.merges))
            self._observing.callback(self._mixing.remove)

    def stop(self) -> None:
        """Remove the hooks."""
        self._observing.close()
        self._started = False

    @torch.no_grad()
    def _write(self, k: int, following: Connection, connection: Connection, args: Sequence[Any], after: State) -> None:
        """Add the terms of branch k (forward hook of its connection, which is called with the branch's output)."""
        before, output = args[:2]
        keep = args[2] if len(args) > 2 else None
        self._add("x", k, connection.read(before))
        if self._has_numbers:
            output = connection.weights().beta * output
        else:
            self._add("change", k, following.end(after) - connection.end(before))
        self._add("f", k, output if keep is None else output * keep)
        last = k + 1 == len(self.net.shortcuts.alphas)
        if last and self._mixing is None and self.net.shortcuts.learned is not None:
            matrix = mixing_matrix(self.net)  # here the weights are whole, even if they are sharded
            self._mixing = torch.nn.functional.pad(matrix, (0, 1), value=1.0)

    def _add(self, name: str, k: int, values: Tensor) -> None:
        """Add the squares of a tensor to the sums, on the device and without waiting for it."""
        self._squares[name][k] = self._squares[name][k] + values.float().square().mean() * values.numel()
        self._counts[name][k] += values.numel()  # one count per term: recomputation need not reach the end of a block


def root_mean_squares(sums: Float[Tensor, "two_terms branches"]) -> dict[str, list[float]]:
    """Return the root mean squares of x_k and f_k, and of the changes if they were measured, for each branch k.

    Args:
        sums: see `BranchTerms.sums`; before a forward pass the result is NaN.
    """
    squares, counts = sums.chunk(2)
    rows = (squares / counts).sqrt().tolist()
    return dict(zip(TERMS, rows, strict=False))


@check_types
class BranchNorms(Callback):
    """Norms and updates of all residual branches, every N steps; other steps cost nothing.

    For each branch it measures the root mean squares of its input x and of its output beta f, over the global batch of
    the step (all micro-batches of all processes). A connection that is not numbers has no beta; the change that it
    makes of the tokens is then measured, too. The update |dW| / |W| is of the branch's last layer.
    Each measurement is a line of branches.jsonl; at the end, branches.png shows them over depth and training.

    If weights of shortcuts are learned, or with attention over depth, the mixing matrix of the step is written to
    mixing/step_N.csv, see `uvit_decay.decay.mixing_matrix`; at the end, mixing.png shows the newest one. With attention
    over depth it is the mean over all tokens of the global batch.

    Args:
        every_n_steps: optimizer steps between measurements.
    """

    def __init__(self, every_n_steps: Positive = 100) -> None:
        self.every_n_steps = every_n_steps
        self._observed: BranchTerms | None = None
        self._mixing: tuple[int, Tensor] | None = None  # the newest mixing matrix and its step

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        if not isinstance(task.net, DecayedNet):
            raise UserError(f"a {type(task.net).__name__} has no known branches: remove BranchNorms from the callbacks")
        self._mixing = None
        self._observed = BranchTerms(task.net)
        self._ends = task.net.branch_ends()
        self._before: list[Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, task: Task, *_: Any) -> None:
        if self._is_due(trainer):
            self._observed.start()

    def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Optimizer) -> None:
        if self._is_due(trainer):
            self._observed.stop()  # evaluations after this step must not count
            self._before = [weight.detach().clone() for weight in self._weights(task)]

    def _is_due(self, trainer: Trainer) -> bool:
        """Return whether the step that is being computed is measured."""
        return (trainer.global_step + 1) % self.every_n_steps == 0 and not trainer.fast_dev_run

    def on_train_batch_end(self, trainer: Trainer, task: Task, *_: Any) -> None:
        if not self._before:
            return
        sums = self._observed.sums.to(task.device)
        terms = root_mean_squares(trainer.strategy.reduce(sums, reduce_op="sum"))
        updates = []  # |dW| / |W| of the last layer of every branch
        for before, after in zip(self._before, self._weights(task), strict=True):
            moved = _length(after.detach() - before)  # on all ranks
            updates.append(_divide(moved, _length(before)))
        self._before = []
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            pairs = zip(terms["f"], terms["x"], strict=True)
            ratios = [_divide(added, stream) for added, stream in pairs]
            values: dict[str, float] = {}
            for name, row in {**terms, "ratio": ratios, "update": updates}.items():
                for k, value in enumerate(row):
                    values[f"{name}_{k}"] = value
            record(trainer, folder / BRANCHES, values, {"branches": self._ends}, {})
        self._save_mixing(trainer, task, folder)

    def _save_mixing(self, trainer: Trainer, task: Task, folder: Path) -> None:
        """Write the mixing matrix of the step, if it is learned; all ranks must call this."""
        sums = self._observed.mixing
        if sums is None:
            return
        sums = trainer.strategy.reduce(sums.float().to(task.device), reduce_op="sum")
        matrix = mixing_of(sums.double().cpu())
        self._mixing = trainer.global_step, matrix
        if trainer.is_global_zero:
            save_mixing(folder, trainer.global_step, matrix, self._ends, task.net.merges)

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        if trainer.fast_dev_run:
            return
        folder = run_folder(trainer)  # all ranks must call it
        if not trainer.is_global_zero:
            return
        measured = history.read(folder / BRANCHES)
        if measured:
            draw(measured, folder / FIGURE)
            log_picture(trainer, folder / FIGURE)
        if self._mixing is not None:
            step, matrix = self._mixing
            log_picture(trainer, draw_mixing(folder, step, matrix))

    def on_exception(self, trainer: Trainer, task: Task, error: BaseException) -> None:
        if self._observed is not None:  # None: the run never began
            self._observed.stop()

    def _weights(self, task: Task) -> list[Tensor]:
        return [task.net.get_submodule(end).weight for end in self._ends]


def draw(measured: list[history.Measurement], path: Path) -> None:
    """Save a figure with one heat map over training and depth for each of TITLES."""
    panels = {}
    with explain(f"cannot draw {path}, its history lacks", KeyError, TypeError):
        branches = len(measured[-1].metadata["branches"])
        for name, title in TITLES.items():
            if name == "change" and "change_0" not in measured[-1].values:
                continue
            rows = []
            for k in range(branches):
                rows.append([measurement.values[f"{name}_{k}"] for measurement in measured])
            panels[title] = torch.tensor(rows)
    steps = [measurement.step for measurement in measured]
    heat_maps(path, panels, steps, ("optimizer step", "residual branch"))


def save_mixing(
    folder: Path, step: int, matrix: Float[Tensor, "rows sources"], branches: Sequence[str], merges: Sequence[Merge]
) -> Path:
    """Write mixing/step_N.csv, a row for each reader and a column for each source, and return its path.

    Args:
        folder: run folder.
        step: number of optimizer steps.
        matrix: see `uvit_decay.decay.mixing_matrix`.
        branches: names of the branches, which are readers and sources.
        merges: merges of long skips, which are the last sources.
    """
    path = folder / MIXING / f"step_{step:08d}.csv"
    path.parent.mkdir(exist_ok=True)
    text = io.StringIO()
    writer = csv.writer(text)
    header = ["reader", "embeddings", *branches]
    for merge in merges:
        header.append(f"merge before {branches[merge.branch]}")
    writer.writerow(header)
    for reader, row in zip([*branches, "output"], matrix.tolist(), strict=True):
        writer.writerow([reader, *row])
    with replacing(path) as file:
        file.write(text.getvalue().encode())
    return path


def draw_mixing(folder: Path, step: int, matrix: Float[Tensor, "rows sources"]) -> Path:
    """Draw mixing.png, a heat map of the matrix of a step, and return its path."""
    path = folder / f"{MIXING}.png"
    rows, sources = matrix.shape
    heat_maps(path, {f"mixing matrix, step {step}": matrix}, range(sources), ("source", f"reader (of {rows})"))
    return path


def _divide(part: float, whole: float) -> float:
    """Return the ratio; NaN if `whole` is 0."""
    return part / whole if whole else math.nan


def _length(weight: Tensor) -> float:
    return float(full_tensor(weight.norm()))
