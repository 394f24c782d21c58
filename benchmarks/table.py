"""The table of the rows, and the JSON file of the same."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Row, Setting
from benchmarks.measuring import Spread

HEADER = ("case", "batch", "precision", "ms", "plain ms", "ratio", "quartiles", "pairs", "GFLOP", "mfu", "MiB", "plain")
WIDTHS = (43, 5, 18, 10, 10, 6, 13, 5, 8, 5, 6, 6)


def line(cells: Iterable[object]) -> str:
    """Return a line of the table: the first and the third column to the left, numbers to the right."""
    aligned = (
        f"{cell!s:{'<' if column in (0, 2) else '>'}{width}}"
        for column, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    )
    return " ".join(aligned).rstrip()


def row_line(row: Row) -> str:
    """Return the line of a row."""
    return line(
        (
            row.case,
            row.batch,
            f"{row.precision}{', compiled' if row.compiled else ''}",
            f"{1e3 * row.seconds.median:.4g}",
            f"{1e3 * row.plain_seconds.median:.4g}",
            f"{row.ratio.median:.2f}",
            f"{row.ratio.low:.2f} .. {row.ratio.high:.2f}",
            row.pairs,
            _or_dash(row.flops, 1e-9, ".4g"),
            _or_dash(row.mfu, 100, ".0f", "%"),
            _or_dash(row.memory, 2**-20, ".0f"),
            _or_dash(row.plain_memory, 2**-20, ".0f"),
        )
    )


def _or_dash(value: float | None, factor: float, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{factor * value:{form}}{unit}"


def find_processor() -> str:
    """Return the name of this machine's CPU."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine(setting: Setting) -> dict[str, Any]:
    """Return what the figures depend on: machine, versions, threads, matrix rates and the date."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if setting.on_gpu else "cpu",
        "processor": find_processor(),
        "capability": "cuda" if setting.on_gpu else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "clock": "CPU time" if setting.cpu_time else "wall",
        "quick": setting.quick,
        "versions": {name: version(name) for name in ("torch", "uvit_decay")} | {"python": platform.python_version()},
        "matrix_rate": setting.rates,
    }


def head(setting: Setting) -> str:
    """Return the lines above the table."""
    facts = machine(setting)
    rates = ", ".join(f"{name} {rate / 1e9:.4g} GFLOP/s" for name, rate in facts["matrix_rate"].items())
    place = f"{facts['device']}, {facts['processor']} ({facts['capability']}), {facts['threads']} threads"
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return f"{facts['date']}, {place}, {facts['clock']} clock; {versions}\nmatrix rate: {rates}\n\n{line(HEADER)}"


def write_json(path: Path, setting: Setting, found: dict[str, list[Row]]) -> None:
    """Write machine and rows, by group; spreads become {low, median, high}."""
    groups = {group: [_plain(row) for row in group_rows] for group, group_rows in found.items()}
    path.write_text(json.dumps({"machine": machine(setting), "groups": groups}, indent=1) + "\n")


def _plain(row: Row) -> dict[str, Any]:
    fields = asdict(row)
    return {name: value._asdict() if isinstance(value, Spread) else value for name, value in fields.items()}
