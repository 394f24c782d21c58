"""Multinomial logistic regression for many grid points (layer, noise level) and l2 penalties at once, in float32.

    min_W  1/n sum_i [log sum_c exp(w_c . z_i) - w_(y_i) . z_i] + l2 / (2 n) |W|^2

is scikit-learn's LogisticRegression with C = 1 / l2. The bias is not penalised. m = grid points, r = l2 penalties, n
and n2 = training and test samples, d = features, k = classes. ClassWeights are (m, r, k, d + 1), the bias last.
The penalty and the best grid point are chosen on a held-out part of the training samples. The test set is only for the
reported accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from uvit_decay.runtime.precision import without_autocast
from uvit_decay.runtime.random import generator
from uvit_decay.terminal.errors import UserError, require_shape
from uvit_decay.terminal.typed import Bounds, Within, check_types

LOGITS = 2**20  # logits of a chunk of samples: 4 MiB fit a CPU's cache; all n x k x r are never allocated
PAIRS = 6  # (step, change of the gradient) pairs that L-BFGS stores
L2_GRID = (0.1, 1.0, 10.0)
HELD_OUT = 0.2
TOLERANCE = 1e-3
CELLS = 8  # grid points in a chunk on a CPU: more exceed its caches, fewer have more overhead for each call

Cells = Float[Tensor, "m n d"]
Labels = Int64[Tensor, " n"]
ClassWeights = Float[Tensor, "m r k d1"]


class Frame(NamedTuple):
    """Affine map z = x linear + offset: features standardised over the training samples, in principal axes, and a 1.

    The last coordinate, 1, is for the bias. The rotation to principal axes leaves |W|^2 unchanged and makes Z'Z
    diagonal; `spectrum` is the diagonal of Z'Z / n.
    """

    axes: Float[Tensor, "m d d"]
    linear: Float[Tensor, "m d d1"]
    offset: Float[Tensor, "m 1 d1"]
    spectrum: Float[Tensor, "m d1"]

    @classmethod
    def of(cls, x: Float[Tensor, "m n d"], axes: Float[Tensor, "m d d"] | None = None) -> Frame:
        """Return the frame of training samples x.

        Features that are constant up to rounding are centred, but not scaled.

        Args:
            x: the training samples.
            axes: axes of the frame of most of these samples, which replace the eigendecomposition by an approximation.
        """
        mean = x.mean(dim=1, keepdim=True)
        centred = x - mean
        gram = centred.mT @ centred / x.shape[1]
        std = gram.diagonal(dim1=1, dim2=2).sqrt()[:, None]  # (m, 1, d)
        std = torch.where(std > 1e-6 * mean.abs(), std, 1.0)
        gram = gram / std / std.mT  # now the correlation matrix, (m, d, d)
        if axes is None:
            axes = torch.linalg.eigh(gram).eigenvectors
        linear = axes / std.mT  # first divide by std, then rotate
        spectrum = (axes * (gram @ axes)).sum(dim=1).clamp(min=1e-6)  # diagonal of axes' gram axes
        # A zero column of `linear` and a last offset of 1 give the constant coordinate of the bias. Its mean square is
        # 1.
        offset = pad(-mean @ linear, (0, 1), value=1.0)
        linear = pad(linear, (0, 1))
        spectrum = pad(spectrum, (0, 1), value=1.0)
        return cls(axes, linear, offset, spectrum)

    def coordinates(self, x: Float[Tensor, "m n d"]) -> Float[Tensor, "m n d1"]:
        """Return z of the samples x, the constant 1 last."""
        return torch.baddbmm(self.offset, x, self.linear)


class Logistic:
    """The minimisation problem of some grid points: its gradient and a diagonal preconditioner, `curvature`.

    At `start` all weights are 0 and the biases are the logarithms of the class frequencies p_c. There the Hessian is
    (diag(p) - p p') (x) Z'Z / n + l2 / n. Gradients sum to zero over the classes. On such vectors the Hessian is close
    to the diagonal `curvature` = p_c spectrum + l2 / n, so that the first step is about a Newton step.

    Args:
        x: features, float32.
        frame: the frame of the same samples.
        labels: classes, 0 to k - 1.
        l2: penalties, in units of scikit-learn's 1 / C.
        k: number of classes.
    """

    def __init__(
        self,
        x: Float[Tensor, "m n d"],
        frame: Frame,
        labels: Int64[Tensor, " n"],
        l2: Float[Tensor, " r"],
        k: int,
    ) -> None:
        m, n, _ = x.shape
        self.z = frame.coordinates(x)
        targets = self.z.new_zeros(k, n).scatter_(0, labels[None], 1.0)  # one-hot labels
        # The part of the gradient that does not depend on the weights: 1/n sum_i [y_i = c] z_i, (m, 1, k, d + 1).
        self.pull = (targets.expand(m, k, n) @ self.z / n)[:, None]
        # l2 / n for the d weights and 0 for the bias, (r, 1, d + 1).
        penalised = pad(torch.ones_like(x[0, 0]), (0, 1))
        self.penalty = l2[:, None, None] * penalised / n
        frequency = targets.mean(dim=1).clamp(min=0.5 / n)[:, None]  # (k, 1); above 0 also for an absent class
        self.curvature = frequency * frame.spectrum[:, None, None] + self.penalty  # (m, r, k, d + 1)
        self.largest = frequency.max()  # about the largest entry of a gradient at the start
        self.start = torch.zeros_like(self.curvature)
        self.start[..., -1:] = frequency.log()

    def gradient(self, w: ClassWeights) -> ClassWeights:
        """Return the gradient 1/n sum_i (p_i - onehot(y_i)) z_i + l2 / n w, p_i = softmax(W z_i), of the problem."""
        m, r, k, _ = w.shape
        flat = w.flatten(1, 2)
        push = torch.zeros_like(flat)
        chunk = max(1, LOGITS // (m * r * k))
        for z in self.z.split(chunk, dim=1):
            # Samples are the last dimension: on a CPU a softmax over a strided dimension is 20 times faster.
            logits = (flat @ z.mT).view(m, r, k, -1)
            push.baddbmm_(logits.softmax(dim=2).flatten(1, 2), z)
        n = self.z.shape[1]
        return push.view_as(w) / n - self.pull + self.penalty * w


class CurvaturePair(NamedTuple):
    """A step s of L-BFGS, the change y of the gradient over it, and rho = 1 / (s . y), or 0 for an unusable pair."""

    s: ClassWeights
    y: ClassWeights
    rho: Float[Tensor, "m r 1 1"]


def minimise(problem: Logistic, w: ClassWeights, iterations: int, tolerance: float) -> ClassWeights:
    """Minimise every (grid point, penalty) problem by preconditioned L-BFGS, with one gradient per iteration.

    There is no line search: a full step is taken, unless the slope at its end shows that it overshot by far. Such a
    step is rejected, but its curvature shortens the next one.

    Args:
        problem: the problems.
        w: weights at the start.
        iterations: largest number of iterations.
        tolerance: stop when no entry of a gradient exceeds this fraction of the largest entry at the start.

    Returns:
        The weights, in the shape of `w`.
    """
    # Work in u = sqrt(curvature) w, where the Hessian at the start is about 1: gradients are divided by the same root.
    root = problem.curvature.sqrt()
    u = w * root
    gradient = problem.gradient(w) / root
    curvature_pairs: list[CurvaturePair] = []
    scale = torch.ones_like(gradient[..., :1, :1])
    for _ in range(iterations):
        # All problems advance together; converged ones take steps of 0. The criterion is on gradients in w.
        largest = (gradient * root).abs().amax(dim=(-2, -1), keepdim=True)
        active = largest > tolerance * problem.largest
        if not active.any():
            break
        step = torch.where(active, -_apply_inverse_hessian(curvature_pairs, scale, gradient), 0.0)
        end = (u + step) / root
        gradient_at_end = problem.gradient(end) / root
        change = gradient_at_end - gradient
        # Slopes along the step at its start (negative) and at its end, and their difference, the curvature.
        slope_at_start = _dot(gradient, step)
        slope_at_end = _dot(gradient_at_end, step)
        curvature = _dot(change, step)
        # A pair enters the inverse Hessian only with positive curvature, which rounding can hide; with rho = 0 it has
        # no effect. Rejected steps are stored too: their curvature shortens the next step.
        usable = curvature > 1e-5 * _dot(step, step)
        rho = torch.where(usable, 1 / curvature, 0.0)
        curvature_pairs = [*curvature_pairs[1 - PAIRS :], CurvaturePair(step, change, rho)]
        # The usual initial inverse Hessian of L-BFGS, from the newest pair.
        scale = torch.where(usable, curvature / _dot(change, change), scale)
        # The objective is convex: its slope grows along the step and is 0 at the minimum. Where the slope at the end
        # exceeds 0.9 |slope_at_start|, the step was about twice as long as the distance to the minimum: reject it.
        accepted = slope_at_end < -0.9 * slope_at_start
        u = torch.where(accepted, u + step, u)
        gradient = torch.where(accepted, gradient_at_end, gradient)
    return u / root


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the scalar product of each (grid point, penalty), (m, r, 1, 1)."""
    return (a * b).sum(dim=(-2, -1), keepdim=True)


def _apply_inverse_hessian(pairs: list[CurvaturePair], scale: Tensor, g: Tensor) -> Tensor:
    """Return an approximate inverse Hessian times g.

    The two-loop recursion of L-BFGS: Nocedal and Wright, Numerical Optimization (2006), Algorithm 7.4, with its names.
    """
    factors = []
    for s, y, rho in reversed(pairs):
        a = rho * _dot(s, g)
        g = g - a * y
        factors.append(a)
    g = g * scale
    for (s, y, rho), a in zip(pairs, reversed(factors), strict=True):
        g = g + (a - rho * _dot(y, g)) * s
    return g


def shuffled(n: int) -> Int64[Tensor, " n"]:
    """Return the fixed random order of n training samples whose first fifth, HELD_OUT, is held out."""
    return torch.randperm(n, generator=generator("probe"))


@dataclass(frozen=True)
class GridScores:
    """For each grid point: held-out accuracy, test accuracy, and the l2 penalty chosen on the held-out part.

    `every_test` is the test accuracy of each penalty. Its maximum over penalties and grid points is the paper's number,
    "best on test". It is selected on the test set, so it is biased upwards and must be labelled as such.
    """

    held_out: Float[Tensor, " m"]
    test: Float[Tensor, " m"]
    l2: Float[Tensor, " m"]
    every_test: Float[Tensor, "m r"]


def check_cells(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> None:
    """Raise a UserError unless there are samples, as many labels, and equal grid points in training and test."""
    require_shape(train.shape[1:2], train_labels=train_labels)
    require_shape(test.shape[1:2], test_labels=test_labels)
    require_shape((train.shape[0], test.shape[1], train.shape[2]), test=test)
    if not all(train.shape + test.shape):
        raise UserError(f"there is nothing to classify: train {tuple(train.shape)}, test {tuple(test.shape)}")


@check_types
@torch.no_grad()
def logistic_grid(
    train: Cells,
    train_labels: Labels,
    test: Float[Tensor, "m n2 d"],
    test_labels: Int64[Tensor, " n2"],
    l2_grid: Annotated[tuple[float, ...], Within("(0, inf)")] = L2_GRID,
    device: torch.device | str = "cpu",
    budget: Annotated[int, Bounds(1, 2**63 - 1)] = 2**30,
    iterations: Annotated[tuple[int, int], Bounds(1)] = (8, 4),
) -> GridScores:
    """Fit logistic regressions for all grid points and l2 penalties at once, each on standardised features.

    Every penalty is fitted to four fifths of the training samples and evaluated on the others. A second fit to all
    samples, initialised with the first, is evaluated on the test set. With the default iterations an accuracy differs
    from scikit-learn's at the same penalty by 0.4 points, on average over the grid points of the bundled network
    (`benchmarks/probe_grid.py`), partly because early stopping helps grid points that overfit. With (60, 40) the fits
    converge, and the difference is 0.1 points.

    Args:
        train: features of the training samples.
        train_labels: class of every training sample.
        test: features of the test samples.
        test_labels: class of every test sample.
        l2_grid: candidates, in units of scikit-learn's 1 / C, whose default is 1; ties go to the first.
        device: device that computes, a chunk of grid points at a time; the features may be on another one.
        budget: largest number of bytes on `device` in addition to the arguments; a single grid point, which needs about
            8 n (d + k), may exceed it.
        iterations: largest number of gradients of the first and of the second fit.
    """
    check_cells(train, train_labels, test, test_labels)
    n = len(train_labels)
    if n < 5 or not l2_grid:
        raise UserError(f"a grid of probes needs five training samples and an l2 penalty, got {n} and {len(l2_grid)}")
    k = int(train_labels.max()) + 1
    device = torch.device(device)
    cell_bytes = _cell_bytes(n, len(test_labels), train.shape[-1], k, len(l2_grid))
    cells = max(1, budget // cell_bytes)
    if device.type == "cpu":
        cells = min(cells, CELLS)
    order = shuffled(n).to(device)
    labels = train_labels.to(device)[order]
    test_labels = test_labels.to(device)
    l2 = torch.tensor(l2_grid, dtype=torch.float32, device=device)
    first_iterations, second_iterations = iterations
    held_out_parts = []
    test_parts = []
    with without_autocast(l2):
        for x, x2 in zip(train.split(cells), test.split(cells), strict=True):
            x = x.to(device, torch.float32)[:, order]
            held_out, start, axes = _fit_held_out(x, labels, l2, k, first_iterations)
            held_out_parts.append(held_out)
            frame = Frame.of(x, axes)
            w = minimise(Logistic(x, frame, labels, l2, k), start, second_iterations, TOLERANCE)
            x2 = x2.to(device, torch.float32)
            test_parts.append(_accuracies(frame, x2, w, test_labels))
    held_out = torch.cat(held_out_parts).cpu()
    every_test = torch.cat(test_parts).cpu()
    return _choose_penalties(held_out, every_test, l2_grid)


def _choose_penalties(held_out: Tensor, every_test: Tensor, l2_grid: Sequence[float]) -> GridScores:
    """Choose the penalty of each grid point by its accuracy on the held-out part, (m, r)."""
    best = held_out.argmax(dim=1, keepdim=True)
    l2 = torch.tensor(l2_grid, dtype=torch.float64)[best[:, 0]]
    best_held_out = held_out.gather(1, best)[:, 0]
    best_test = every_test.gather(1, best)[:, 0]
    return GridScores(best_held_out, best_test, l2, every_test)


@torch.no_grad()
def fit_accuracy(
    train: Cells,
    labels: Labels,
    test: Float[Tensor, "m n2 d"],
    test_labels: Int64[Tensor, " n2"],
    l2: float,
    iterations: int = 60,
) -> Float[Tensor, " m"]:
    """Fit a logistic regression to all training samples until it converges; return each grid point's test accuracy.

    Args:
        train: features of the training samples, on the device that computes; they are standardised.
        labels: class of every training sample.
        test: features of the test samples.
        test_labels: class of every test sample.
        l2: penalty, in units of scikit-learn's 1 / C.
        iterations: largest number of gradients.
    """
    penalty = torch.tensor([l2], dtype=torch.float32, device=train.device)
    with without_autocast(train):
        frame = Frame.of(train)
        problem = Logistic(train, frame, labels, penalty, int(labels.max()) + 1)
        w = minimise(problem, problem.start, iterations, TOLERANCE)
        return _accuracies(frame, test, w, test_labels)[:, 0].cpu()


def _fit_held_out(x: Cells, labels: Labels, l2: Tensor, k: int, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fit to the last four fifths of the samples; return accuracies (m, r) on the first fifth, the weights and axes."""
    first = round(HELD_OUT * len(labels))
    rest = x[:, first:]
    frame = Frame.of(rest)
    problem = Logistic(rest, frame, labels[first:], l2, k)
    w = minimise(problem, problem.start, iterations, TOLERANCE)
    accuracy = _accuracies(frame, x[:, :first], w, labels[:first])
    return accuracy, w, frame.axes


def _accuracies(frame: Frame, x: Cells, w: Float[Tensor, "m r k d1"], labels: Labels) -> Float[Tensor, "m r"]:
    """Return the accuracy of every grid point and penalty on the samples x."""
    _, r, k, _ = w.shape
    logits = w.flatten(1, 2) @ frame.coordinates(x).mT
    guesses = logits.unflatten(1, (r, k)).max(dim=2).indices
    return (guesses == labels).double().mean(dim=-1)


def _cell_bytes(n: int, n2: int, d: int, k: int, r: int) -> int:
    """Return the bytes of a grid point: samples and one-hot labels, both twice, test samples, logits, and L-BFGS."""
    train = 2 * n * (d + 1 + k)
    test = n2 * (2 * d + 1 + 2 * r * k + 2 * r)
    lbfgs = (2 * PAIRS + 12) * r * k * (d + 1)
    return 4 * (train + test + lbfgs + 3 * LOGITS)
