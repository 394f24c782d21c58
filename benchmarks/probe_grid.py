"""How far the accuracies of the probes' grid are from scikit-learn's, and the memory of a large level.

python -m benchmarks.probe_grid [--ckpt C --data D --max-train 2000 --max-test 1000] [--large]

Features of a checkpoint, by default the bundled one on the digits, at all layers and 8 noise levels. --large: 13 layers
x 50,000 samples x 512 features, 100 classes, random, a layer at a time. `python -m benchmarks --only probes` has times.
"""

import argparse
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measuring import added_memory
from benchmarks.probes import CHECKPOINT, features, scikit_learn, standardised
from uvit_decay.representations.knn import knn_accuracy
from uvit_decay.representations.logistic import L2_GRID, GridScores, logistic_grid
from uvit_decay.runtime.random import generator


def differences(name: str, scores: GridScores, wanted: list[Tensor]) -> None:
    """Print those of the test accuracies, in points, for each l2 penalty."""
    for l2, ours, theirs in zip(L2_GRID, scores.every_test.T, wanted, strict=True):
        off = 100 * (ours - theirs)
        size = off.abs()
        print(
            f"{name}, l2 {l2:g}: accuracy {ours.mean():.4f}, scikit-learn's {theirs.mean():.4f}; difference in "
            f"points: {off.mean():+.2f}, absolute {size.mean():.2f}, largest {size.max():.2f}"
        )


def compared(ckpt: Path, data: str, max_train: int, max_test: int) -> None:
    """Print how far the accuracies are from scikit-learn's, and what choosing by held-out samples costs."""
    train, y, test, y2 = standardised(*features(ckpt, data, max_train, max_test))
    print(f"{len(train)} cells, {train.shape[1]} x {train.shape[2]}, {len(L2_GRID)} l2 penalties")
    wanted = [*scikit_learn(train, y, test, y2, L2_GRID).T]
    scores = logistic_grid(train, y, test, y2)
    differences("default", scores, wanted)
    differences("converged", logistic_grid(train, y, test, y2, iterations=(60, 40)), wanted)
    best = scores.held_out.argmax()
    chosen = f"best grid point on held-out samples: test {scores.test[best]:.3f}"
    print(f"{chosen}; best on test: {scores.every_test.max():.3f}")


def large(layers: int = 13, n: int = 50_000, n2: int = 10_000, d: int = 512, classes: int = 100) -> None:
    """A level layer by layer, as a caller does that cannot hold it."""
    random = generator("large level")
    means = torch.randn(classes, d, generator=random) / d**0.25
    y, y2 = (torch.randint(classes, (size,), generator=random) for size in (n, n2))

    def run() -> None:
        for layer in range(layers):
            train, test = (means[part] + torch.randn(1, len(part), d, generator=random) for part in (y, y2))
            start = time.perf_counter()
            linear = logistic_grid(train, y, test, y2)
            middle = time.perf_counter()
            near = knn_accuracy(train, y, test, y2)
            print(
                f"layer {layer}: linear {float(linear.test):.4f} in {middle - start:.1f} s, "
                f"20 neighbours {float(near):.4f} in {time.perf_counter() - middle:.1f} s",
                flush=True,
            )

    print(
        f"{layers} layers, {n} x {d}, {classes} classes, the features among it: "
        f"{added_memory(run, torch.device('cpu')) / 2**30:.2f} GiB at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt", type=Path, default=CHECKPOINT)
    parser.add_argument("--data", default="digits", help="as evaluate.py probe --data")
    parser.add_argument("--max-train", type=int, default=2000)
    parser.add_argument("--max-test", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--large", action="store_true", help="the memory of a large level instead; minutes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", module="sklearn")
    if options.large:
        large()
    else:
        compared(options.ckpt, options.data, options.max_train, options.max_test)


if __name__ == "__main__":
    main()
