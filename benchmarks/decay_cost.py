"""What the decay costs: a decayed U-ViT against the ordinary one, and the fused add against alpha * x + f.

python benchmarks/decay_cost.py [--threads 1] [--pairs 15]; prints median ratios of paired runs, after a warm-up.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from uvit_decay.decay import decayed_add
from uvit_decay.nn import UViT


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(name: str, a: Callable[[], object], b: Callable[[], object], pairs: int) -> None:
    """Print the median of a/b over pairs that run in turn, and the quartiles."""
    for run in (a, b, a, b):
        run()
    ratios = [seconds(a) / seconds(b) for _ in range(pairs)]
    low, median, high = statistics.quantiles(ratios, n=4)
    print(f"{name:58} {median:.3f}  (quartiles {low:.3f} to {high:.3f}, {pairs} pairs)")


def training_step(alpha_min: float) -> Callable[[], None]:
    torch.manual_seed(0)
    net = UViT(16, 2, 3, dim=256, depth=6, heads=4, alpha_min=alpha_min, zero_init=False)
    x, t = torch.randn(8, 3, 16, 16), torch.rand(8)

    def step() -> None:
        net.zero_grad()
        net(x, t).square().mean().backward()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x, f = torch.randn(128, 257, 512), torch.randn(128, 257, 512)
    compare("training step, alpha_min 0.7 / alpha_min 1", training_step(0.7), training_step(1.0), options.pairs)
    compare("decayed_add(x, f, 0.7) / (x + f)", lambda: decayed_add(x, f, 0.7), lambda: x + f, options.pairs)
    compare(
        "decayed_add(x, f, 0.7) / (0.7 * x + f)", lambda: decayed_add(x, f, 0.7), lambda: 0.7 * x + f, options.pairs
    )


if __name__ == "__main__":
    main()
