"""What the probes' grid costs against scikit-learn in a loop, how far they differ, and the memory of a large level.

python benchmarks/probe_grid.py [--ckpt C --data D --max-train 2000 --max-test 1000] [--repeats 5] [--large]

Features of a checkpoint, by default the bundled one on the digits, at all layers and 8 noise levels. --large: 13 layers
x 50,000 samples x 512 features, 100 classes, random, a layer at a time.
"""

import argparse
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from uvit_decay.checkpoint import load
from uvit_decay.evaluation.open_by_name import open_data
from uvit_decay.representations.knn import knn_accuracy
from uvit_decay.representations.logistic import HELD_OUT, L2_GRID, GridScores, logistic_grid
from uvit_decay.representations.options import TIMES, Probing
from uvit_decay.representations.probing import Prober
from uvit_decay.runtime.random import generator

CHECKPOINT = Path(__file__).parent.parent / "checkpoints" / "digits.safetensors"


def features(ckpt: Path, data: str, max_train: int, max_test: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Float32 (levels * layers, n, d) and labels (n,), of training and test images."""
    found = load(ckpt)
    images = open_data(data, None, found.net.image_size, found.net.channels)
    prober = Prober(found.net, found.path, images, Probing(max_train=max_train, max_test=max_test), torch.device("cpu"))
    levels = [prober.features(level) for level in range(len(TIMES))]
    train, test = (torch.cat([level[side] for level in levels]) for side in (0, 2))
    return train, levels[0][1], test, levels[0][3]


def scikit_learn(train: Tensor, y: Tensor, test: Tensor, y2: Tensor, l2: float) -> tuple[Tensor, float]:
    """Accuracy of each cell, and the seconds that the loop took."""
    from sklearn.linear_model import LogisticRegression

    start, accuracies = time.perf_counter(), []
    for x, x2 in zip(train.numpy(), test.numpy(), strict=True):
        fitted = LogisticRegression(C=1 / l2, max_iter=5000).fit(x, y.numpy())
        accuracies.append(fitted.score(x2, y2.numpy()))
    return torch.tensor(accuracies, dtype=torch.float64), time.perf_counter() - start


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """After a warm-up."""
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def differences(name: str, scores: GridScores, wanted: list[Tensor]) -> None:
    """Print those of the test accuracies, in points, for each l2 penalty."""
    for l2, ours, theirs in zip(L2_GRID, scores.every_test.T, wanted, strict=True):
        off = 100 * (ours - theirs)
        size = off.abs()
        print(
            f"{name}, l2 {l2:g}: accuracy {ours.mean():.4f}, scikit-learn's {theirs.mean():.4f}; difference in "
            f"points: {off.mean():+.2f}, absolute {size.mean():.2f}, largest {size.max():.2f}"
        )


def compared(train: Tensor, y: Tensor, test: Tensor, y2: Tensor, repeats: int) -> None:
    mean, std = train.mean(dim=1, keepdim=True), train.std(dim=1, correction=0, keepdim=True)
    train, test = (train - mean) / std, (test - mean) / std
    print(f"{len(train)} cells, {train.shape[1]} x {train.shape[2]}, {len(L2_GRID)} l2 penalties")

    ours = median_seconds(lambda: logistic_grid(train, y, test, y2), repeats)
    fits = [scikit_learn(train, y, test, y2, l2) for l2 in L2_GRID]
    first = round(HELD_OUT * len(y))
    kept = [scikit_learn(train[:, first:], y[first:], train[:, :first], y[:first], l2)[1] for l2 in L2_GRID]
    once = fits[L2_GRID.index(1.0)][1]
    same = sum(seconds for _, seconds in fits) + sum(kept)
    print(f"the grid, a sweep on held-out samples and fits to all of them: {ours:.2f} s")
    print(f"scikit-learn, one fit a cell with its default penalty: {once:.2f} s, {once / ours:.1f} times the grid's")
    print(f"scikit-learn, the sweep and the fits: {same:.2f} s, {same / ours:.1f} times the grid's")

    wanted = [accuracies for accuracies, _ in fits]
    scores = logistic_grid(train, y, test, y2)
    differences("default", scores, wanted)
    differences("converged", logistic_grid(train, y, test, y2, iterations=(60, 40)), wanted)
    best = scores.held_out.argmax()
    print(f"best cell on held-out samples: test {scores.test[best]:.3f}; best on test: {scores.every_test.max():.3f}")
    seconds = median_seconds(lambda: knn_accuracy(train.split(1024, dim=1), y, test, y2), 1)
    print(f"20 nearest neighbours of all cells: {seconds:.2f} s")


def resident() -> float:
    """GiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**30


def peak(run: Callable[[], object]) -> float:
    """GiB that `run` adds at most, looked at every 5 ms."""
    before, highest, done = resident(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            highest[0] = max(highest[0], resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return highest[0]


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
            near = knn_accuracy(train.split(4096, dim=1), y, test, y2)
            print(
                f"layer {layer}: linear {float(linear.test):.4f} in {middle - start:.1f} s, "
                f"20 neighbours {float(near):.4f} in {time.perf_counter() - middle:.1f} s",
                flush=True,
            )

    print(f"{layers} layers, {n} x {d}, {classes} classes, the features among it: {peak(run):.2f} GiB at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt", type=Path, default=CHECKPOINT)
    parser.add_argument("--data", default="digits", help="as evaluate.py probe --data")
    parser.add_argument("--max-train", type=int, default=2000)
    parser.add_argument("--max-test", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--large", action="store_true", help="the memory of a large level instead; minutes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", module="sklearn")
    if options.large:
        large()
    else:
        compared(*features(options.ckpt, options.data, options.max_train, options.max_test), options.repeats)


if __name__ == "__main__":
    main()
