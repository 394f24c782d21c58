"""The Inception Score (Salimans et al., 2016): exp of the mean KL of p(y | x) from p(y); n = images, k = classes."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Positive, check_types

# Seed of torch-fidelity's order of the images. Its scores, and so published scores, depend on the order.
ORDER_SEED = 2020


@check_types
def inception_score(logits: Float[Tensor, "n k"], splits: Positive = 10) -> tuple[float, float]:
    """Return mean and standard deviation (ddof 0) of the score over `splits` parts, in float64.

    Order and parts are torch-fidelity's: NumPy's permutation of seed 2020, cut at i n // splits. Computed on the CPU,
    one part at a time.

    Args:
        logits: logits of n images for k classes, before the softmax.
        splits: number of parts, from 1 to n.
    """
    n = len(logits)
    if n < splits:
        raise UserError(f"the Inception Score over {splits} splits needs at least {splits} images, got {n}")
    stream = np.random.RandomState(ORDER_SEED)  # noqa: NPY002 - as in torch-fidelity
    order = torch.from_numpy(stream.permutation(n))
    shuffled = logits.cpu()[order]
    scores = []
    for i in range(splits):
        part = shuffled[i * n // splits : (i + 1) * n // splits]
        log_p = part.double().log_softmax(dim=1)
        log_marginal = log_p.logsumexp(dim=0) - math.log(len(log_p))
        divergences = (log_p.exp() * (log_p - log_marginal)).sum(dim=1)
        scores.append(divergences.mean().exp())
    values = torch.stack(scores)
    return float(values.mean()), float(values.std(correction=0))
