"""Measure what each kind of shortcut costs in a U-ViT: time and memory of a training step, and parameters.

    python -m benchmarks.shortcut_cost [--rounds 9] [--clock cpu] [--threads 1] [--kinds linear attnres ...]

All networks are in one process and take a step in turn, so that a drift of the machine affects all alike. Time and
memory are ratios to the plain network, the time in each round. The table is in Markdown, as in docs/shortcuts.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from benchmarks.measuring import Clock, added_memory, ratios
from benchmarks.table import find_processor
from uvit_decay.decay.table import SHORTCUTS
from uvit_decay.diffusion import diffusion_loss
from uvit_decay.diffusion.noise_path import VP
from uvit_decay.nn import UViT
from uvit_decay.tasks.optim.options import Optimization

PLAIN = "plain"
SIZES = {"image_size": 16, "patch_size": 2, "channels": 3, "dim": 256, "depth": 12, "heads": 4}
BATCH, ALPHA_MIN = 8, 0.7
MEMORY_STEPS = 3


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = list(SHORTCUTS)
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: beside other programs")
    parser.add_argument("--kinds", nargs="+", choices=known, default=known, metavar="KIND", help="default: all")
    parser.add_argument("--width", type=int, default=SIZES["dim"], help="default: %(default)s")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    networks = {PLAIN: build_network("linear", 1.0, options.width)}
    for kind in options.kinds:
        alpha_min = ALPHA_MIN if SHORTCUTS[kind].falls else 1.0
        networks[kind] = build_network(kind, alpha_min, options.width)
    steps = {kind: build_step(net) for kind, net in networks.items()}
    memory = {}
    for kind, step in steps.items():
        step()  # allocates the moments of the optimizer
        memory[kind] = min(added_memory(step, device) for _ in range(MEMORY_STEPS))  # the allocator adds to some
    seconds = Clock(device, cpu_time=options.clock == "cpu").in_turn(steps, options.rounds)
    print(f"{find_processor()}, {options.threads} threads, {options.clock} clock, {options.rounds} rounds\n")
    print("| schedule | time (quartiles) | memory | parameters |\n| --- | --- | --- | --- |")
    counts = {kind: sum(parameter.numel() for parameter in net.parameters()) for kind, net in networks.items()}
    for kind in options.kinds:
        low, median, high = ratios(seconds[kind], seconds[PLAIN])
        cost = f"{median:.2f} ({low:.2f} to {high:.2f}) | {memory[kind] / memory[PLAIN]:.2f}"
        print(f"| `{kind}` | {cost} | {counts[kind] - counts[PLAIN]:+,} |")


def build_network(kind: str, alpha_min: float, width: int) -> UViT:
    """Return a U-ViT of 65 tokens in which no branch is silent."""
    torch.manual_seed(0)
    sizes = {**SIZES, "dim": width}
    return UViT(**sizes, init="xavier", zero_init=False, schedule=kind, alpha_min=alpha_min)


def build_step(net: UViT) -> Callable[[], None]:
    """Return a training step in float32: loss, backward pass and the step of AdamW."""
    optim = Optimization(lr=1e-4)
    optimizer = optim.build(net, optim.lr)
    x = torch.randn(BATCH, net.channels, net.image_size, net.image_size)
    t, eps = torch.rand(BATCH), torch.randn_like(x)
    path = VP()

    def step() -> None:
        diffusion_loss(net, path, "eps", x, None, t, eps).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
