"""Multinomial logistic regressions for many cells and several l2 strengths (ridges) at once, in float32.

    min_W  1/n sum_i [log sum_c exp(w_c . z_i) - w_(y_i) . z_i] + ridge / (2 n) |W|^2

is scikit-learn's LogisticRegression with C = 1 / ridge; the bias is not penalised. m = cells, r = ridges, n = samples,
d = features, k = classes. Weights are (m, r, k, d + 1), the bias last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import pad

LOGITS = 2**20  # logits of a chunk of samples: 4 MiB fit a CPU's cache; the full n x k x r are never allocated
PAIRS = 6  # (step, change of the gradient) pairs that L-BFGS stores

Weights = Float[Tensor, "m r k d1"]


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

        `axes`, of a frame of most of these samples, replace the eigendecomposition by an approximation. Features that
        are constant up to rounding are centred, but not scaled.
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
        # A zero column of `linear` and a last offset of 1 give the constant coordinate of the bias, whose mean square
        # is 1.
        return cls(axes, pad(linear, (0, 1)), pad(-mean @ linear, (0, 1), value=1.0), pad(spectrum, (0, 1), value=1.0))

    def coordinates(self, x: Float[Tensor, "m n d"]) -> Float[Tensor, "m n d1"]:
        """Return z of the samples x, the constant 1 last."""
        return torch.baddbmm(self.offset, x, self.linear)


class Logistic:
    """The minimisation problem of some cells: its gradient and a diagonal preconditioner, `curvature`.

    At `start` all weights are 0 and the biases are the logarithms of the class frequencies p_c. There the Hessian is
    (diag(p) - p p') (x) Z'Z / n + ridge / n. Gradients sum to zero over the classes; on these the Hessian is close to
    the diagonal `curvature` = p_c spectrum + ridge / n, so that the first step is about a Newton step.

    Args:
        x: features, float32.
        frame: the frame of the same samples.
        labels: classes, 0 to k - 1.
        ridges: l2 strengths, in units of scikit-learn's 1 / C.
        k: number of classes.
    """

    def __init__(
        self, x: Float[Tensor, "m n d"], frame: Frame, labels: Int64[Tensor, " n"], ridges: Float[Tensor, " r"], k: int
    ) -> None:
        m, n, _ = x.shape
        self.z = frame.coordinates(x)
        targets = self.z.new_zeros(k, n).scatter_(0, labels[None], 1.0)  # one-hot labels
        # The part of the gradient that does not depend on the weights: 1/n sum_i [y_i = c] z_i, (m, 1, k, d + 1).
        self.pull = (targets.expand(m, k, n) @ self.z / n)[:, None]
        # ridge / n for the d weights and 0 for the bias, (r, 1, d + 1).
        self.penalty = ridges[:, None, None] * pad(torch.ones_like(x[0, 0]), (0, 1)) / n
        frequency = targets.mean(dim=1).clamp(min=0.5 / n)[:, None]  # (k, 1); above 0 also for an absent class
        self.curvature = frequency * frame.spectrum[:, None, None] + self.penalty  # (m, r, k, d + 1)
        self.largest = frequency.max()  # about the largest entry of a gradient at the start
        self.start = torch.zeros_like(self.curvature)
        self.start[..., -1:] = frequency.log()

    def gradient(self, w: Weights) -> Weights:
        """Return the gradient 1/n sum_i (p_i - onehot(y_i)) z_i + ridge / n w, p_i = softmax(W z_i), of the problem."""
        m, r, k, _ = w.shape
        flat = w.flatten(1, 2)
        pushed = torch.zeros_like(flat)
        for z in self.z.split(max(1, LOGITS // (m * r * k)), dim=1):
            # Samples are the last dimension: on a CPU a softmax over a strided dimension is 20 times faster.
            logits = (flat @ z.mT).view(m, r, k, -1)
            pushed.baddbmm_(logits.softmax(dim=2).flatten(1, 2), z)
        return pushed.view_as(w) / self.z.shape[1] - self.pull + self.penalty * w


def minimised(problem: Logistic, w: Weights, iterations: int, tolerance: float) -> Weights:
    """Minimise every (cell, ridge) problem by preconditioned L-BFGS from `w`, with one gradient an iteration.

    There is no line search: a full step is taken, unless the slope at its end shows that it overshot by far. Such a
    step is rejected, but its curvature shortens the next one. Stops when no entry of a gradient exceeds `tolerance`
    times the largest at the start, or after `iterations`. Returns weights in the shape of `w`.
    """
    # Work in u = sqrt(curvature) w, where the Hessian at the start is about 1: gradients are divided by the same root.
    root = problem.curvature.sqrt()
    u, g = w * root, problem.gradient(w) / root
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []
    scale = torch.ones_like(g[..., :1, :1])
    for _ in range(iterations):
        # All problems advance together; converged ones take steps of 0. The criterion is on gradients in w.
        active = (g * root).abs().amax(dim=(-2, -1), keepdim=True) > tolerance * problem.largest
        if not active.any():
            break
        step = torch.where(active, -_inverse(pairs, scale, g), 0.0)
        moved = problem.gradient((u + step) / root) / root
        change = moved - g
        # Slopes along the step at its start (negative) and at its end, and their difference, the curvature.
        before, after, bend = _dot(g, step), _dot(moved, step), _dot(change, step)
        # A pair enters the inverse Hessian only with positive curvature, which rounding can hide; with rho = 0 it has
        # no effect. Rejected steps are stored too: their curvature shortens the next step.
        learned = bend > 1e-5 * _dot(step, step)
        pairs = [*pairs[1 - PAIRS :], (step, change, torch.where(learned, 1 / bend, 0.0))]
        # The usual initial inverse Hessian of L-BFGS, from the newest pair.
        scale = torch.where(learned, bend / _dot(change, change), scale)
        # The objective is convex: its slope grows along the step and is 0 at the minimum. Where the slope at the end
        # exceeds 0.9 |before|, the step was about twice as long as the distance to the minimum: reject it.
        good = after < -0.9 * before
        u, g = torch.where(good, u + step, u), torch.where(good, moved, g)
    return u / root


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the scalar product of each (cell, ridge), (m, r, 1, 1)."""
    return (a * b).sum(dim=(-2, -1), keepdim=True)


def _inverse(pairs: list[tuple[Tensor, Tensor, Tensor]], scale: Tensor, g: Tensor) -> Tensor:
    """Return an approximate inverse Hessian times g, from pairs (step, change of the gradient, 1 / their product).

    The two-loop recursion of L-BFGS: Nocedal and Wright, Numerical Optimization (2006), Algorithm 7.4.
    """
    steps = []
    for s, y, rho in reversed(pairs):
        a = rho * _dot(s, g)
        g = g - a * y
        steps.append(a)
    g = g * scale
    for (s, y, rho), a in zip(pairs, reversed(steps), strict=True):
        g = g + (a - rho * _dot(y, g)) * s
    return g
