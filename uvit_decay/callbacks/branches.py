"""Norm and update of every residual branch over training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from uvit_decay import history
from uvit_decay.callbacks.loggers import log_picture
from uvit_decay.callbacks.run_log import continue_history, record, run_folder
from uvit_decay.decay import branch_weights
from uvit_decay.nn.base import DecayedNet
from uvit_decay.nn.block import AdaLNBlock, Block
from uvit_decay.plots import heat_maps
from uvit_decay.runtime.errors import UserError, check_whole, explained
from uvit_decay.tasks.base import Task
from uvit_decay.tasks.sharding import full

FILE, FIGURE = "branches.jsonl", "branches.png"
TITLES = {
    "x": "rms of x",
    "f": "rms of beta f",
    "ratio": "their ratio, beta f / x",
    "update": "|dW| / |W| of the last layer",
}


class BranchTerms:
    """The root mean squares of x_k and of beta_k f_k, for every branch k of a network in all forward passes observed.

    x_k is what the norm of the branch reads, and beta f the rest of the sum: x_{k+1} - alpha_k x_k. Compiled blocks run
    as they are written meanwhile, since their graphs ignore hooks.
    """

    def __init__(self, net: DecayedNet) -> None:
        self.net, self.blocks = net, net.find_decayed_blocks()
        if not all(isinstance(block, Block | AdaLNBlock) for block in self.blocks.values()):
            raise UserError(f"a {type(net).__name__} has branches without norms: remove BranchNorms from the callbacks")
        if net.depth_attention is not None:
            schedule = net.config["schedule"]
            raise UserError(f"the schedule {schedule} has no stream to measure: remove BranchNorms from the callbacks")
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
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
        """Sums over the forward passes of this process, float32 (4, branches), which waits for the device.

        The rows are the sums of x_k^2 and of (beta_k f_k)^2, and how many numbers each of them has. Sums of several
        processes may be added before `root_mean_squares` turns them into the terms.
        """
        return torch.tensor([list(map(float, row)) for row in self._rows])

    def _reset(self) -> None:
        branches = len(self.net.shortcuts.alphas)
        self._rows: list[list[Tensor | float]] = [[0.0] * branches for _ in range(4)]

    def start(self) -> None:
        """Forget earlier forward passes and register the hooks, unless they are registered."""
        if self._handles:
            return
        self._reset()
        for i, block in enumerate(self.blocks.values()):
            for k, norm in ((2 * i, block.norm1), (2 * i + 1, block.norm2)):
                self._handles.append(norm.register_forward_pre_hook(partial(self._enter, k)))
            self._handles.append(block.register_forward_hook(partial(self._leave, 2 * i + 1)))
            block._compiled_call_impl, block._graph = None, block._compiled_call_impl

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for block in self.blocks.values():
            block._compiled_call_impl = block.__dict__.pop("_graph", block._compiled_call_impl)

    def _enter(self, k: int, norm: nn.Module, args: Sequence[Tensor]) -> None:
        x = args[0].detach()
        if k % 2:
            self._end(k - 1, x)
        self._add(0, k, x)
        self._state = x

    def _leave(self, k: int, block: nn.Module, args: object, out: Tensor) -> None:
        self._end(k, out.detach())
        del self._state

    def _end(self, k: int, x: Tensor) -> None:
        alpha = branch_weights(self.net, self.net.shortcuts, k).alpha
        self._add(1, k, x - alpha * self._state)

    @torch.no_grad()
    def _add(self, row: int, k: int, x: Tensor) -> None:
        """Add the squares of a tensor to a row of the sums, on the device and without waiting for it."""
        self._rows[row][k] = self._rows[row][k] + x.float().square().mean() * x.numel()
        self._rows[row + 2][k] += x.numel()  # of its own: recomputation need not reach the end of a block


def root_mean_squares(sums: Tensor) -> tuple[list[float], list[float]]:
    """Return the root mean squares of x_k and of beta_k f_k for each branch k, given the sums of `BranchTerms`."""
    squares_x, squares_f, count_x, count_f = sums
    return (squares_x / count_x).sqrt().tolist(), (squares_f / count_f).sqrt().tolist()


class BranchNorms(Callback):
    """Norms and updates of all residual branches, every N steps; other steps cost nothing.

    For each branch: the root mean squares of the stream x that it reads and of beta f that it adds, over the global
    batch of the step (all micro-batches of all processes), and how far the step moved the weight of the branch's last
    layer, relative to its length. Adds a line to branches.jsonl, and draws branches.png over depth and training at the
    end.

    Args:
        every_n_steps: optimizer steps between measurements.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        check_whole(1, every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._observed: BranchTerms | None = None

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        if not isinstance(task.net, DecayedNet):
            raise UserError(f"a {type(task.net).__name__} has no known branches: remove BranchNorms from the callbacks")
        self._observed, self._ends = BranchTerms(task.net), task.net.branch_ends()
        self._before: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        continue_history(trainer, FILE)

    def on_train_batch_start(self, trainer: Trainer, task: Task, *_: Any) -> None:
        if (trainer.global_step + 1) % self.every_n_steps == 0 and not trainer.fast_dev_run:
            self._observed.start()

    def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Optimizer) -> None:
        if (trainer.global_step + 1) % self.every_n_steps == 0 and not trainer.fast_dev_run:
            self._observed.stop()  # evaluations after this step must not count
            self._before = [weight.detach().clone() for weight in self._weights(task)]

    def on_train_batch_end(self, trainer: Trainer, task: Task, *_: Any) -> None:
        if not self._before:
            return
        sums = self._observed.sums.to(task.device)
        x, f = root_mean_squares(trainer.strategy.reduce(sums, reduce_op="sum"))
        pairs = zip(self._before, self._weights(task), strict=True)
        updates = [(_length(after.detach() - before), _length(before)) for before, after in pairs]
        self._before = []
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            found = {"x": x, "f": f, "ratio": [_ratio(*pair) for pair in zip(f, x, strict=True)]}
            found["update"] = [_ratio(moved, length) for moved, length in updates]
            values = {f"{name}_{k}": value for name, row in found.items() for k, value in enumerate(row)}
            record(trainer, folder / FILE, values, {"branches": self._ends}, {})

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        if trainer.fast_dev_run:
            return
        path = run_folder(trainer) / FILE  # on all ranks: they exchange it
        if trainer.is_global_zero and (measured := history.read(path)):
            draw(measured, path.with_name(FIGURE))
            log_picture(trainer, path.with_name(FIGURE))

    def on_exception(self, trainer: Trainer, task: Task, error: BaseException) -> None:
        if self._observed is not None:  # else the run never began
            self._observed.stop()

    def _weights(self, task: Task) -> list[Tensor]:
        return [task.net.get_submodule(end).weight for end in self._ends]


def draw(measured: list[history.Measurement], path: Any) -> None:
    """Save a heat map over training and depth of each of TITLES."""
    with explained(f"cannot draw {path}, its history lacks", KeyError, TypeError):
        branches = measured[-1].metadata["branches"]
        found = {
            title: torch.tensor([[m.values[f"{name}_{k}"] for m in measured] for k in range(len(branches))])
            for name, title in TITLES.items()
        }
    heat_maps(path, found, [m.step for m in measured], ("optimizer step", "residual branch"))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _length(weight: Tensor) -> float:
    return float(full(weight.norm()))
