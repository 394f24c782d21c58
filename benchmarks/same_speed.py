"""Compare two checkouts in the time and the memory of a training step: forward, backward and the optimizer's step.

    python -m benchmarks.same_speed OLD_CHECKOUT NEW_CHECKOUT [--pairs 9] [--schedules linear ...] [--clock cpu]

For each network and precision, a process of each checkout builds the network and waits. The program then asks both for
a step in turn, every second time in the opposite order, so that a drift of the machine affects both alike. The ratio is
the time of OLD divided by the time of NEW in the same round: above 1, NEW is faster. Memory is what a step adds to the
resident memory of its process. On a machine that other programs use, measure CPU seconds with `--clock cpu`.

The processes call only what both checkouts have; the `benchmarks.measuring` of each is its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from benchmarks.measuring import ratios

NETWORKS = ("uvit-s/2", "sit-s/2")
PRECISIONS = ("float32", "bf16")
LINE = "{:10} {:12} {:9} {:>5} {:>9} {:>9} {:>7}  {:15} {:>8} {:>8} {:>7}"
TITLES = ("network", "schedule", "precision", "pairs", "old ms", "new ms", "old/new", "quartiles", "old MiB")
MEMORY_STEPS = 3


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="checkout to compare with, such as a git worktree")
    parser.add_argument("new", type=Path, help="checkout whose speed is in question")
    parser.add_argument("--pairs", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS, help=", ".join(NETWORKS))
    parser.add_argument("--schedules", nargs="+", default=["linear"], help="kinds of shortcuts; default: linear")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: beside other programs")
    parser.add_argument("--quick", action="store_true", help="tiny networks, to test the program")
    options = parser.parse_args(argv)
    print(LINE.format(*TITLES, "new MiB", "new/old"), flush=True)
    for network in options.networks:
        for schedule in options.schedules:
            for precision in PRECISIONS:
                print(compare(network, schedule, precision, options), flush=True)


def compare(network: str, schedule: str, precision: str, options: argparse.Namespace) -> str:
    """Measure both checkouts in turn; return the line of the table."""
    words = [network, schedule, precision, str(options.batch), options.clock, str(options.quick)]
    sides = {"old": Side(options.old, words), "new": Side(options.new, words)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.pairs):
        names = ["old", "new"] if number % 2 == 0 else ["new", "old"]
        for name in names:
            seconds[name].append(sides[name].ask("time"))
    memory: dict[str, float] = {}
    for name, side in sides.items():
        memory[name] = statistics.median(side.ask("memory") for _ in range(MEMORY_STEPS)) / 2**20
        side.end()
    low, median, high = ratios(seconds["old"], seconds["new"])
    return LINE.format(
        network,
        schedule,
        precision,
        options.pairs,
        f"{1e3 * statistics.median(seconds['old']):.1f}",
        f"{1e3 * statistics.median(seconds['new']):.1f}",
        f"{median:.3f}",
        f"{low:.3f} .. {high:.3f}",
        f"{memory['old']:.0f}",
        f"{memory['new']:.0f}",
        f"{memory['new'] / memory['old']:.3f}",
    )


class Side:
    """The process of a checkout, which has built a network."""

    def __init__(self, checkout: Path, words: Sequence[str]) -> None:
        command = [sys.executable, "-P", __file__, "--side", *words]
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
        environment["CUDA_VISIBLE_DEVICES"] = ""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.ask("time")  # the first step also allocates memory; both sides are built before one is measured

    def ask(self, what: str) -> float:
        """Return the seconds (`time`) or the bytes (`memory`) of the next step."""
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"error: the process of {self._process.args} has ended, see its message above")
        return float(answer)

    def end(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def answer_questions(
    network: str, schedule: str, precision: str, batch: str, clock: str, quick: str, questions: IO[str]
) -> None:
    """Build a training step, and print its time or memory for each line of `questions`."""
    import torch

    from benchmarks.measuring import Clock, added_memory

    torch.set_num_threads(1)
    device = torch.device("cpu")
    step = build_step(network, schedule, precision == "bf16", int(batch), quick == "True")
    measured = Clock(device, cpu_time=clock == "cpu")
    for question in questions:
        value = measured.seconds(step) if question.strip() == "time" else added_memory(step, device)
        print(value, flush=True)


def build_step(network: str, schedule: str, autocast: bool, batch: int, quick: bool) -> Callable[[], None]:
    """Return a training step of a network: loss, backward pass and the step of AdamW."""
    import torch

    from uvit_decay.diffusion import diffusion_loss
    from uvit_decay.diffusion.noise_path import VP
    from uvit_decay.nn.sizes import create_model
    from uvit_decay.tasks.optim.options import Optimization

    sizes = {"dim": 32, "depth": 2, "heads": 2} if quick else {}
    alpha_min = 0.7 if schedule in ("linear", "cosine", "learnable", "gain") else 1.0
    torch.manual_seed(0)
    net = create_model(network, alpha_min, schedule=schedule, image_size=32, channels=3, **sizes)
    optim = Optimization(lr=1e-4)
    optimizer = optim.build(net, optim.lr)
    x, eps, t = torch.randn(batch, 3, 32, 32), torch.randn(batch, 3, 32, 32), torch.rand(batch)
    path = VP()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = diffusion_loss(net, path, "eps", x, None, t, eps).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        answer_questions(*sys.argv[2:], questions=sys.stdin)
    else:
        main()
