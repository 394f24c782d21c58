"""What a case is, where it is measured, and how it becomes rows of the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from benchmarks.measuring import DTYPES, Clock, Run, Spread, added_memory, matrix_rate, ratios
from uvit_decay.terminal.errors import UserError


@dataclass(frozen=True)
class Setting:
    """Where and how all cases of a run are measured.

    Args:
        device: device of the networks.
        quick: sizes that take seconds, to test the program; their figures mean nothing.
        compiled: measure networks compiled with torch.compile, too.
        cpu_time: time the CPU seconds of this process.
        budget: seconds after which a case starts no further round.
    """

    device: torch.device
    quick: bool = False
    compiled: bool = False
    cpu_time: bool = False
    budget: float = 20.0

    @cached_property
    def clock(self) -> Clock:
        return Clock(self.device, self.cpu_time)

    @cached_property
    def rates(self) -> dict[str, float]:
        """The matrix rate of each precision, FLOP/s, measured once."""
        threads = torch.get_num_threads()
        return {name: matrix_rate(self.device, dtype, threads, self.clock.now) for name, dtype in DTYPES.items()}

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def size(self, cpu: int, gpu: int, quick: int) -> int:
        """Return the size that belongs to this setting."""
        return quick if self.quick else gpu if self.on_gpu else cpu


@dataclass(frozen=True)
class Agreement:
    """How far the two sides of a comparison are apart, relative to the values, and how far they may be."""

    difference: float
    tolerance: float

    def check(self, name: str) -> None:
        """Raise a UserError if the sides do not compute the same: their ratio would mean nothing."""
        if not self.difference <= self.tolerance:
            raise UserError(
                f"{name}: our result and the plain reference's differ by {self.difference:.2g}, more than "
                f"{self.tolerance:g}: their times cannot be compared"
            )


@dataclass(frozen=True)
class Compared:
    """Two runs of a case that are compared.

    Args:
        precision: precision of our side, as shown.
        ours: name of our run.
        plain: name of the plain reference's run.
        agreement: how far their results are apart.
        compiled: whether our network is compiled; the plain one never is.
        rate: matrix rate to compare with, a name in `Setting.rates`; None where matrices are not the work.
        cost: whether the ratio is our time over the reference's, instead of the reverse.
    """

    precision: str
    ours: str
    plain: str
    agreement: Agreement
    compiled: bool = False
    rate: str | None = None
    cost: bool = False


@dataclass(frozen=True)
class Case:
    """Runs that are measured in turn.

    Args:
        name: what is done, on what.
        batch: images, or what the case counts, of one run.
        runs: the functions to time.
        compared: which of them belong together.
        pairs: most rounds.
        flops: model FLOPs of one run.
        held: bytes that a run needs beside those it adds: weights, gradients' moments, average.
    """

    name: str
    batch: int
    runs: dict[str, Run]
    compared: list[Compared]
    pairs: int
    flops: int | None = None
    held: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One line of the table; the fields of the JSON. Seconds are of one run, memory is in bytes."""

    case: str
    precision: str
    compiled: bool
    batch: int
    pairs: int
    seconds: Spread
    plain_seconds: Spread
    ratio: Spread
    flops: int | None
    mfu: float | None
    memory: int | None
    plain_memory: int | None
    difference: float
    tolerance: float


def rows(case: Case, setting: Setting) -> Iterator[Row]:
    """Check and measure a case; yield a row for each comparison."""
    for compared in case.compared:
        compared.agreement.check(f"{case.name}, {compared.precision}")
        if compared.compiled:
            case.runs[compared.ours]()  # compiles
    memory = {name: _memory(case, name, setting) for name in case.runs}  # the warm-up, too
    found = setting.clock.in_turn(case.runs, 2 if setting.quick else case.pairs, setting.budget)
    for compared in case.compared:
        ours, plain = found[compared.ours], found[compared.plain]
        seconds = Spread.of(ours)
        rate = setting.rates[compared.rate] if compared.rate and case.flops else None
        yield Row(
            case=case.name,
            precision=compared.precision,
            compiled=compared.compiled,
            batch=case.batch,
            pairs=len(ours),
            seconds=seconds,
            plain_seconds=Spread.of(plain),
            ratio=ratios(ours, plain) if compared.cost else ratios(plain, ours),
            flops=case.flops,
            mfu=case.flops / seconds.median / rate if rate else None,
            memory=memory[compared.ours],
            plain_memory=memory[compared.plain],
            difference=compared.agreement.difference,
            tolerance=compared.agreement.tolerance,
        )


def _memory(case: Case, name: str, setting: Setting) -> int | None:
    added = added_memory(case.runs[name], setting.device)
    return None if added is None else added + case.held.get(name, 0)
