"""The cost of sampling: the number of network evaluations (NFE), each image counted, and the seconds that they take."""

from __future__ import annotations

import torch
from torch import Tensor

from uvit_decay.diffusion.prediction import Network
from uvit_decay.diffusion.sampling import DiffusionModel, Sampling
from uvit_decay.runtime import cost
from uvit_decay.runtime.precision import Precision, chosen_precision, computing

ADAPTIVE = 100  # assumed network evaluations of an adaptive sampler


class NFECounter:
    """Wrapper of a network, with the same call, that counts evaluations per image in `nfe`; a guided step is two."""

    def __init__(self, net: Network) -> None:
        self.net, self.nfe = net, 0

    def __call__(self, x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        self.nfe += len(x)
        return self.net(x, t, y)


def total_nfe(count: int, sampling: Sampling) -> int:
    """Return the per-image network evaluations of `count` samples; a guided one counts twice."""
    return count * (sampling.nfe or ADAPTIVE) * (1 if sampling.guidance == 1.0 else 2)


@torch.no_grad()
def estimated_seconds(model: DiffusionModel, nfe: int, batch_size: int, precision: Precision | None = None) -> float:
    """Estimate the seconds that this number of per-image evaluations takes; the estimate costs at most 2 % of them."""

    def evaluate(batch: int) -> Tensor:
        x = torch.zeros(batch, *model.shape, device=model.device)
        t = torch.full((batch,), 0.5, device=model.device)
        y = torch.zeros(batch, dtype=torch.int64, device=model.device) if model.num_classes else None
        return model.net(x, t, y)

    with computing(model.device, chosen_precision(precision, model.device)):
        return cost.estimated_seconds(evaluate, nfe, batch_size)
