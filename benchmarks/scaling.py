"""How cost grows: training steps, probes and metrics against their sizes, and several devices against their links.

python -m benchmarks.scaling [--quick] [--only steps probes metrics processes devices] [--clock wall] [--json FILE]

One thread. A training step is predicted as FLOPs / measured matrix rate + a streams + b parameters + c: streams are the
bytes of the tokens of all blocks (4 x batch x tokens x blocks x width); a, b, c >= 0 are fitted to all rows at once.
`processes` takes two cores; `devices` measures nothing: it predicts from assumed rates.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import networks
from benchmarks.measuring import Clock, Run, added_memory, matrix_rate
from benchmarks.training import OurStep, flops, images, task_of
from uvit_decay.metrics.frechet import Moments, frechet_distance
from uvit_decay.metrics.kid import kernel_distance
from uvit_decay.metrics.precision_recall import precision_recall
from uvit_decay.nn import UViT
from uvit_decay.representations.logistic import logistic_grid

CPU = torch.device("cpu")
Row = dict[str, Any]


class Shape(NamedTuple):
    """Sizes of a training step of a U-ViT with patches of 4x4 pixels."""

    batch: int = 16
    image: int = 32
    depth: int = 6
    width: int = 192

    @property
    def stream(self) -> int:
        """Bytes of the tokens of all blocks."""
        return 4 * self.batch * ((self.image // 4) ** 2 + 1) * (self.depth + 1) * self.width

    def net(self) -> UViT:
        return UViT(self.image, 4, 3, self.width, self.depth, self.width // 32, alpha_min=0.7, init="xavier")


STEPS = [
    *(Shape(batch=batch) for batch in (1, 4, 16, 64)),
    *(Shape(image=image) for image in (16, 64, 96)),
    *(Shape(depth=depth) for depth in (2, 12)),
    *(Shape(width=width) for width in (64, 384)),
]


class Accelerator(NamedTuple):
    """Assumed rates of one device of a cluster, in FLOP/s and bytes/s; `share` of the peak is reached by a step."""

    peak: float = 989e12  # H100 SXM, bfloat16, dense
    share: float = 0.45
    inside: float = 0.8 * 450e9  # NVLink, one direction, among the 8 devices of a machine
    between: float = 0.8 * 8 * 50e9  # a machine's eight 400 Gb/s InfiniBand ports, each in a ring of its own
    machine: int = 8
    latency: float = 10e-6  # of each of the 2 log2(N) steps of a tree
    bucket: int = 25 * 2**20  # bytes of DDP's last bucket, which is sent when the backward pass is over


def seconds(clock: Clock, run: Run, budget: float) -> float:
    """Return the median seconds of a call, after one more."""
    run()
    return statistics.median(clock.in_turn({"run": run}, 15, budget)["run"])


def fitted(columns: Sequence[Sequence[float]], target: Sequence[float], scale: Sequence[float]) -> np.ndarray:
    """Return the coefficients, at least 0, with which the columns add up to the target, with errors over `scale`."""
    scales = np.array(scale, dtype=float)
    return nnls(np.array(columns, dtype=float).T / scales[:, None], np.array(target, dtype=float) / scales)[0]


def parameters(net: nn.Module) -> int:
    """Return the number of the parameters."""
    return sum(parameter.numel() for parameter in net.parameters())


def markdown(title: str, rows: list[Row], columns: Sequence[str]) -> str:
    """Return a table in Markdown; what a row lacks is a dash."""
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for row in rows:
        cells = (row.get(name, "-") for name in columns)
        lines.append(f"| {' | '.join(f'{cell:.4g}' if isinstance(cell, float) else str(cell) for cell in cells)} |")
    return "\n".join(["", title, "", *lines, ""])


def show(title: str, rows: list[Row], columns: Sequence[str]) -> None:
    """Print a table in Markdown."""
    print(markdown(title, rows, columns), end="", flush=True)


def steps(clock: Clock, quick: bool) -> list[Row]:
    """Measure a training step in float32: loss, backward, fused AdamW and EMA; predict it and its memory."""
    rate = matrix_rate(CPU, torch.float32, 1, clock.now)
    rows: list[Row] = []
    shapes = [Shape(2, 16, 2, 64), Shape(4, 16, 2, 64)] if quick else STEPS
    for shape in shapes:
        net = shape.net()
        run = partial(OurStep(task_of(net).train(), images(net, shape.batch, CPU), CPU), False)
        taken = seconds(clock, run, 0.1 if quick else 6.0)
        counted = {"parameters": parameters(net), "gflop": flops(net, shape.batch) / 1e9, "ms": 1e3 * taken}
        rows.append({**shape._asdict(), **counted, "MiB": (added_memory(run, CPU) or 0) / 2**20})
    streams, sizes = [shape.stream for shape in shapes], [row["parameters"] for row in rows]
    times, products = [row["ms"] for row in rows], [1e12 * row["gflop"] / rate for row in rows]
    rest = [taken - product for taken, product in zip(times, products, strict=True)]
    cost = fitted([streams, sizes, [1.0] * len(rows)], rest, times)
    memory = [row["MiB"] * 2**20 for row in rows]
    held = fitted([streams, [4 * size for size in sizes]], memory, [max(value, 2**20) for value in memory])
    for row, product, stream in zip(rows, products, streams, strict=True):
        row["predicted ms"] = product + cost @ [stream, row["parameters"], 1.0]
        row["predicted MiB"] = (held @ [stream, 4 * row["parameters"]]) / 2**20
    show(
        "Training step, float32, one thread",
        rows,
        [*Shape._fields, "gflop", "ms", "predicted ms", "MiB", "predicted MiB"],
    )
    print(f"\nmatrix rate {rate / 1e9:.0f} GFLOP/s; the rest: {cost[0] * 2**20:.2f} ms a MiB of stream, ", end="")
    print(f"{cost[1] * 1e6:.2f} ms a million parameters, {cost[2]:.1f} ms; memory: {held[0]:.1f} streams, ", end="")
    print(f"{held[1]:.1f} copies of the weights")
    return rows


def probes(clock: Clock, quick: bool) -> list[Row]:
    """Measure a grid of logistic regressions with a choice of penalties: samples of width 64 and 10 classes."""
    random = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    for cells, samples in (
        [(2, 200), (4, 200)] if quick else [(8, 1400), (32, 1400), (128, 1400), (8, 5600), (8, 22400)]
    ):
        labels = torch.arange(samples) % 10
        train = torch.randn(cells, samples, 64, generator=random) + labels[:, None] * 0.1
        run = partial(logistic_grid, train, labels, train[:, : samples // 4], labels[: samples // 4])
        taken, added = seconds(clock, run, 0.1 if quick else 2.0), added_memory(run, CPU) or 0
        rows.append({"cells": cells, "samples": samples, "ms": 1e3 * taken, "MiB": added / 2**20})
    work = [row["cells"] * row["samples"] for row in rows]
    cost = fitted([work, [row["cells"] for row in rows]], times := [row["ms"] for row in rows], times)
    for row, size in zip(rows, work, strict=True):
        row["predicted ms"] = cost @ [size, row["cells"]]
    show("Probes", rows, ["cells", "samples", "ms", "predicted ms", "MiB"])
    print(f"\n{cost[1]:.2f} ms a cell and {1e3 * cost[0]:.2f} us a sample of a cell")
    return rows


def metrics(clock: Clock, quick: bool) -> list[Row]:
    """Measure what follows the extraction of features of Inception's width: sums, distances, neighbours."""
    width = 64 if quick else 2048
    rows: list[Row] = []
    for samples in (100, 200) if quick else (500, 1000, 2000):
        x, y = torch.randn(2, samples, width, generator=torch.Generator().manual_seed(0))
        moments = [Moments(width, sync=False) for _ in range(2)]
        row: Row = {"samples": samples, "moments ms": 1e3 * clock.seconds(lambda: moments[0].update(x))}  # noqa: B023
        moments[1].update(y)
        both = [part.compute() for part in moments]
        row["frechet ms"] = 1e3 * clock.seconds(partial(frechet_distance, *both))
        row["kid ms"] = 1e3 * clock.seconds(partial(kernel_distance, x, y, 2, 100 if quick else 500)) * 50
        row["prc ms"] = 1e3 * clock.seconds(partial(precision_recall, x, y))
        row["prc MiB"] = (added_memory(partial(precision_recall, x, y), CPU) or 0) / 2**20
        row["prc ns a pair"] = 1e6 * row["prc ms"] / (3 * samples**2)
        rows.append(row)
    show(f"Metrics of features of width {width}, after their extraction", rows, list(rows[0]))
    return rows


def _process(rank: int, size: int, folder: str, clock: Clock, quick: bool) -> None:
    """Measure, as one of `size` processes: a step alone, the all-reduce of its gradients, and both under DDP."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting{size}", rank=rank, world_size=size)
    shape = Shape(2, 16, 2, 64) if quick else Shape(batch=8, width=384)
    net = shape.net()
    gradients = torch.zeros(parameters(net))

    def step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
        model(x, torch.full((len(x),), 0.5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    x = torch.randn(shape.batch, 3, shape.image, shape.image)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True)
    alone = partial(step, net, x, optimizer)
    together = partial(step, DistributedDataParallel(net), x, optimizer)
    for run in (alone, together):
        run()
    runs = {"step": alone, "all-reduce": partial(dist.all_reduce, gradients), "both": together}
    found = clock.in_turn(runs, 3 if quick else 7)
    row: Row = {"processes": size, "gradients MB": 4 * len(gradients) / 1e6}
    row |= {f"{name} ms": 1e3 * statistics.median(values) for name, values in found.items()}
    row["predicted ms"] = row["step ms"] + row["all-reduce ms"] * (size > 1)  # no core is free to overlap them
    if rank == 0:
        Path(folder, f"row{size}.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def processes(clock: Clock, quick: bool) -> list[Row]:
    """Measure processes of this machine that train together over gloo; CPU time leaves out that they wait."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, 2):
            torch.multiprocessing.spawn(_process, (size, folder, clock, quick), size)
            rows.append(json.loads(Path(folder, f"row{size}.json").read_text()))
    names = ["processes", "gradients MB", "step ms", "all-reduce ms", "both ms", "predicted ms"]
    show("Processes that train together over gloo on one machine, one thread each", rows, names)
    return rows


def communication(size: float, count: int, device: Accelerator) -> float:
    """Return the seconds of an all-reduce: 2 (N - 1) / N of the bytes over the slowest link of a ring, and latency."""
    link = device.between if count > device.machine else device.inside
    return 2 * (count - 1) / count * size / link + 2 * math.log2(count) * device.latency


def devices(clock: Clock, quick: bool) -> list[Row]:
    """Predict steps of data-parallel training: all buckets but the last overlap with backward passes, 2/3 of a step."""
    device, rows = Accelerator(), []
    nets = {"uvit-s/2": networks.uvit_s, "uvit-m/2": networks.uvit_m, "sit-xl/2": partial(networks.sit_xl, 28)}
    for name, build in {"uvit-s/2": nets["uvit-s/2"]}.items() if quick else nets.items():
        with torch.device("meta"):
            net = build()
        work, size = flops(net, 1), 4 * parameters(net)
        for count in (1, 8, 64, 512):
            row: Row = {"network": name, "parameters M": size / 4e6, "GFLOP an image": work / 1e9, "devices": count}
            whole, last = (communication(part, count, device) for part in (size, min(size, device.bucket)))
            row["all-reduce ms"] = 1e3 * whole
            for batch in (32, 2):
                compute = 1e3 * batch * work / (device.peak * device.share)
                step = compute + max(1e3 * last, row["all-reduce ms"] - 2 / 3 * compute)
                row[f"step ms, {batch} each"], row[f"efficiency, {batch} each"] = step, compute / step
            row["images/s, 32 each"] = 32e3 * count / row["step ms, 32 each"]
            rows.append(row)
    show(f"Prediction, not measured: {device}", rows, list(rows[0]))
    return rows


PARTS = {part.__name__: part for part in (steps, probes, metrics, processes, devices)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test the program in seconds")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="cpu", help="default: %(default)s")
    parser.add_argument("--json", type=Path, default=Path("runs/scaling.json"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start, clock = time.perf_counter(), Clock(CPU, options.clock == "cpu")
    found = {name: PARTS[name](clock, options.quick) for name in options.only}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{time.perf_counter() - start:.0f} s; {options.json}")


if __name__ == "__main__":
    main()
