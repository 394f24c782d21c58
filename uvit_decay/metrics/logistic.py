"""Multinomial logistic regressions of many cells and several ridges, all at once, in float32.

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

LOGITS = 2**20  # so many at a time: 4 MiB stay in a CPU's cache, and no n x k x r logits ever exist
PAIRS = 6

Weights = Float[Tensor, "m r k d1"]


class Frame(NamedTuple):
    """z = x linear + offset: features standardised over the training samples, in principal axes, and a 1 for the bias.

    A rotation is nothing to the ridge, and in these axes Z'Z is diagonal; `spectrum` is that diagonal over n.
    """

    axes: Float[Tensor, "m d d"]
    linear: Float[Tensor, "m d d1"]
    offset: Float[Tensor, "m 1 d1"]
    spectrum: Float[Tensor, "m d1"]

    @classmethod
    def of(cls, x: Float[Tensor, "m n d"], axes: Float[Tensor, "m d d"] | None = None) -> Frame:
        """The frame of training samples; the `axes` of most of them spare the eigenvectors of all.

        A feature that is constant but for rounding is only centred.
        """
        mean = x.mean(dim=1, keepdim=True)
        centred = x - mean
        gram = centred.mT @ centred / x.shape[1]
        std = gram.diagonal(dim1=1, dim2=2).sqrt()[:, None]
        std = torch.where(std > 1e-6 * mean.abs(), std, 1.0)
        gram = gram / std / std.mT
        if axes is None:
            axes = torch.linalg.eigh(gram).eigenvectors
        linear = axes / std.mT
        spectrum = (axes * (gram @ axes)).sum(dim=1).clamp(min=1e-6)
        return cls(axes, pad(linear, (0, 1)), pad(-mean @ linear, (0, 1), value=1.0), pad(spectrum, (0, 1), value=1.0))

    def coordinates(self, x: Float[Tensor, "m n d"]) -> Float[Tensor, "m n d1"]:
        return torch.baddbmm(self.offset, x, self.linear)


class Logistic:
    """The problem of some cells: its gradient, and the curvature that preconditions it.

    Where the model knows no more than the classes' frequencies p_c, which is at `start`, the Hessian is
    (diag(p) - p p') (x) Z'Z / n + ridge / n, and `curvature` = p_c spectrum + ridge / n does about the same to
    gradients, whose sum over classes is zero: the first step is Newton's, a ridge regression.

    Args:
        x: features, float32.
        frame: of the same samples.
        labels: classes below k.
        ridges: in units of scikit-learn's 1 / C.
        k: number of classes.
    """

    def __init__(
        self, x: Float[Tensor, "m n d"], frame: Frame, labels: Int64[Tensor, " n"], ridges: Float[Tensor, " r"], k: int
    ) -> None:
        m, n, _ = x.shape
        self.z = frame.coordinates(x)
        targets = self.z.new_zeros(k, n).scatter_(0, labels[None], 1.0)
        self.pull = (targets.expand(m, k, n) @ self.z / n)[:, None]  # 1/n sum_i [y_i = c] z_i
        self.penalty = ridges[:, None, None] * pad(torch.ones_like(x[0, 0]), (0, 1)) / n
        frequency = targets.mean(dim=1).clamp(min=0.5 / n)[:, None]  # a class may be absent
        self.curvature = frequency * frame.spectrum[:, None, None] + self.penalty
        self.largest = frequency.max()  # entry of a gradient at the start, about
        self.start = torch.zeros_like(self.curvature)
        self.start[..., -1:] = frequency.log()

    def gradient(self, w: Weights) -> Weights:
        m, r, k, _ = w.shape
        flat = w.flatten(1, 2)
        pushed = torch.zeros_like(flat)
        for z in self.z.split(max(1, LOGITS // (m * r * k)), dim=1):
            # samples last: a softmax over a strided dimension is 20 times faster on a CPU than over the last one
            logits = (flat @ z.mT).view(m, r, k, -1)
            pushed.baddbmm_(logits.softmax(dim=2).flatten(1, 2), z)
        return pushed.view_as(w) / self.z.shape[1] - self.pull + self.penalty * w


def minimised(problem: Logistic, w: Weights, iterations: int, tolerance: float) -> Weights:
    """L-BFGS from `w` where `curvature` is made 1, each (cell, ridge) on its own, one gradient an iteration.

    No line search: a full step is taken unless the slope at its end says that it went much too far; then the weights
    stay where they are, and what was learned of the curvature shortens the next step. Stops when no entry of a
    gradient exceeds `tolerance` times the largest at the start, or after `iterations`.
    """
    root = problem.curvature.sqrt()
    u, g = w * root, problem.gradient(w) / root
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []
    scale = torch.ones_like(g[..., :1, :1])
    for _ in range(iterations):
        active = (g * root).abs().amax(dim=(-2, -1), keepdim=True) > tolerance * problem.largest
        if not active.any():
            break
        step = torch.where(active, -_inverse(pairs, scale, g), 0.0)
        moved = problem.gradient((u + step) / root) / root
        change = moved - g
        before, after, bend = _dot(g, step), _dot(moved, step), _dot(change, step)
        learned = bend > 1e-5 * _dot(step, step)  # else rounding, or a cell that has converged
        pairs = [*pairs[1 - PAIRS :], (step, change, torch.where(learned, 1 / bend, 0.0))]
        scale = torch.where(learned, bend / _dot(change, change), scale)
        good = after < -0.9 * before
        u, g = torch.where(good, u + step, u), torch.where(good, moved, g)
    return u / root


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=(-2, -1), keepdim=True)


def _inverse(pairs: list[tuple[Tensor, Tensor, Tensor]], scale: Tensor, g: Tensor) -> Tensor:
    """An approximate inverse Hessian times g, from (step, change of the gradient, 1 / their product).

    The two loops of L-BFGS: Nocedal and Wright, Numerical Optimization (2006), Algorithm 7.4.
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
