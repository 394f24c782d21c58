"""The Inception Score (Salimans et al., 2016): exp of the mean KL of p(y | x) from p(y); n = pictures, k = classes."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from uvit_decay.errors import UserError
from uvit_decay.randomness import generator


def inception_score(logits: Float[Tensor, "n k"], splits: int = 10) -> tuple[float, float]:
    """Mean and standard deviation (ddof 0) of the score over `splits` parts, in float64 and a fixed random order.

    Raises:
        UserError: fewer pictures than splits.
    """
    if len(logits) < splits:
        raise UserError(f"the Inception Score over {splits} splits needs as many pictures, got {len(logits)}")
    order = torch.randperm(len(logits), generator=generator("inception score"))
    log_p = logits.double().cpu()[order].log_softmax(dim=1)
    scores = []
    for part in log_p.tensor_split(splits):
        log_marginal = part.logsumexp(dim=0) - math.log(len(part))
        scores.append((part.exp() * (part - log_marginal)).sum(dim=1).mean().exp())
    values = torch.stack(scores)
    return float(values.mean()), float(values.std(correction=0))


class InceptionScore(Metric):
    """Collects logits over batches and processes; compute() is `inception_score` of them all."""

    full_state_update = False

    def __init__(self, splits: int = 10) -> None:
        super().__init__()
        self.splits = splits
        self.add_state("logits", [], dist_reduce_fx="cat")

    def update(self, logits: Float[Tensor, "n k"]) -> None:
        self.logits.append(logits.float())

    def compute(self) -> tuple[float, float]:
        return inception_score(dim_zero_cat(self.logits), self.splits)
