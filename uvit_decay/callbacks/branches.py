"""Norm and update of every residual branch over training."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from uvit_decay.callbacks.periodic import record
from uvit_decay.decay import mixing_matrix
from uvit_decay.decay.mixing import Merge, MixingSums, mixing_of
from uvit_decay.files.writing import replacing
from uvit_decay.nn.base import DecayedNet
from uvit_decay.nn.block import AdaLNBlock, Block
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
}


class BranchTerms:
    """The root mean squares of x_k and of beta_k f_k, for every branch k of a network in all observed forward passes.

    x_k is the input of the branch's norm, and beta_k f_k = x_{k+1} - alpha_k x_k. With attention over depth there is no
    such sum, and f_k is the output of the branch. Meanwhile compiled blocks run uncompiled, since their graphs ignore
    hooks.
    """

    # A branch adds to the stream within its block, where no hook sees beta_k f_k. But every branch begins with a norm,
    # whose input is the stream, so that beta_k f_k is found as a difference when the next branch begins:
    #
    #     hook of norm1 (_enter, k = 2 i)      x_k; it is kept in _state
    #     hook of norm2 (_enter, k = 2 i + 1)  x_{k+1}: branch k has ended (_end)
    #     hook of the block (_leave)           the output of the block: branch 2 i + 1 has ended
    #
    # The end of a block is taken from its output and not from the next block, because a long skip may be merged between
    # them. Connections that are not numbers get the outputs of the branches: hooks (_write) take them there.

    def __init__(self, net: DecayedNet) -> None:
        self.net = net
        self.blocks = net.find_decayed_blocks()
        if not all(isinstance(block, Block | AdaLNBlock) for block in self.blocks.values()):
            raise UserError(f"a {type(net).__name__} has branches without norms: remove BranchNorms from the callbacks")
        self._handles: list[torch.utils.hooks.RemovableHandle | MixingSums] = []
        self._reset()

    @property
    def x(self) -> list[float]:
        """The root mean square of x_k for each branch k on this process; NaN before the first forward pass."""
        return root_mean_squares(self.sums)[0]

    @property
    def f(self) -> list[float]:
        """The root mean square of beta_k f_k for each branch k on this process; NaN before the first forward pass."""
        return root_mean_squares(self.sums)[1]

    @property
    def sums(self) -> Tensor:
        """Sums over the forward passes of this process, float32 (4, branches); reading them waits for the device.

        The rows are the sum of x_k^2, the sum of (beta_k f_k)^2, and the number of summands in each of the two. Sums of
        several processes may be added before they are passed to `root_mean_squares`.
        """
        return torch.tensor([list(map(float, row)) for row in self._rows])

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
        self._rows: list[list[Tensor | float]] = [[0.0] * branches for _ in range(4)]
        self._mixing: MixingSums | Tensor | None = None

    def start(self) -> None:
        """Forget earlier forward passes and register the hooks, unless they are registered."""
        if self._handles:
            return
        self._reset()
        if hasattr(self.net, "depth_attention"):
            self._mixing = MixingSums(self.net.depth_attention, len(self.net.merges))
            self._handles.append(self._mixing)
        has_numbers = self.net.shortcuts.build is None
        if not has_numbers:
            for k, connection in enumerate(self.net.connections):
                self._handles.append(connection.register_forward_hook(partial(self._write, k)))
        for i, block in enumerate(self.blocks.values()):
            first, second = 2 * i, 2 * i + 1
            self._handles += [
                block.norm1.register_forward_pre_hook(partial(self._enter, first)),
                block.norm2.register_forward_pre_hook(partial(self._enter, second)),
            ]
            if has_numbers:
                self._handles.append(block.register_forward_hook(partial(self._leave, second)))
        for part in self._parts:
            part._graph = part._compiled_call_impl  # of torch.compile, which ignores new hooks; `stop` puts it back
            part._compiled_call_impl = None

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for part in self._parts:
            part._compiled_call_impl = part.__dict__.pop("_graph", part._compiled_call_impl)

    @property
    def _parts(self) -> list[nn.Module]:
        """The modules that may be compiled: the network or its blocks."""
        return [self.net, *self.blocks.values()]

    def _enter(self, k: int, norm: nn.Module, args: Sequence[Tensor]) -> None:
        x = args[0].detach()
        self._add(0, k, x)
        if self.net.shortcuts.build is not None:
            return
        if k % 2:  # an MLP: the attention of its block has ended
            self._end(k - 1, x)
        self._state = x

    def _leave(self, k: int, block: nn.Module, args: object, out: Tensor) -> None:
        self._end(k, out.detach())
        del self._state
        if self._mixing is None and self.net.shortcuts.learned is not None:
            matrix = mixing_matrix(self.net)  # here the weights are whole, even if they are sharded
            self._mixing = torch.nn.functional.pad(matrix, (0, 1), value=1.0)

    def _write(self, k: int, connection: nn.Module, args: Sequence[Any], state: object) -> None:
        _, output, keep = args
        self._add(1, k, output.detach() if keep is None else output.detach() * keep)

    def _end(self, k: int, x: Tensor) -> None:
        alpha = self.net.connections[k].weights().alpha
        self._add(1, k, x - alpha * self._state)

    @torch.no_grad()
    def _add(self, row: int, k: int, x: Tensor) -> None:
        """Add the squares of a tensor to row `row` of the sums, on the device and without waiting for it."""
        self._rows[row][k] = self._rows[row][k] + x.float().square().mean() * x.numel()
        self._rows[row + 2][k] += x.numel()  # one count per row: recomputation need not reach the end of a block


def root_mean_squares(sums: Tensor) -> tuple[list[float], list[float]]:
    """Return the root mean squares of x_k and of beta_k f_k for each branch k, given `BranchTerms.sums`."""
    squares_x, squares_f, count_x, count_f = sums
    x = (squares_x / count_x).sqrt()
    f = (squares_f / count_f).sqrt()
    return x.tolist(), f.tolist()


@check_types
class BranchNorms(Callback):
    """Norms and updates of all residual branches, every N steps; other steps cost nothing.

    For each branch it measures the root mean squares of its input x and of its output beta f, over the global batch of
    the step (all micro-batches of all processes). It also measures the update |dW| / |W| of the branch's last layer.
    Each measurement is a line of branches.jsonl; at the end, branches.png shows them over depth and training.

    If shortcuts are learned, or attention over depth replaces them, the mixing matrix of the step is written to
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
        x, f = root_mean_squares(trainer.strategy.reduce(sums, reduce_op="sum"))
        updates = []  # |dW| / |W| of the last layer of every branch
        for before, after in zip(self._before, self._weights(task), strict=True):
            moved = _length(after.detach() - before)  # on all ranks
            updates.append(_divide(moved, _length(before)))
        self._before = []
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            ratios = [_divide(added, stream) for added, stream in zip(f, x, strict=True)]
            values: dict[str, float] = {}
            for name, row in {"x": x, "f": f, "ratio": ratios, "update": updates}.items():
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
