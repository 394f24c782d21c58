"""Losses and the training step as the official codes write them: torch's default AdamW and an EMA tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn


def eps_loss(net: nn.Module, x: Tensor, y: Tensor | None, t: Tensor, eps: Tensor) -> Tensor:
    """Return U-ViT's loss on its VP path."""
    log_alpha = -0.25 * t**2 * (20 - 0.1) - 0.5 * t * 0.1
    alpha, sigma = torch.exp(log_alpha), torch.sqrt(1 - torch.exp(2 * log_alpha))
    x_t = alpha[:, None, None, None] * x + sigma[:, None, None, None] * eps
    return ((eps - net(x_t, 999 * t, y)) ** 2).flatten(1).mean(dim=-1).mean()


def velocity_loss(net: nn.Module, x: Tensor, y: Tensor | None, t: Tensor, eps: Tensor) -> Tensor:
    """Return SiT's loss on the linear path, at SiT's time t."""
    t_ = t[:, None, None, None]
    return ((net(t_ * x + (1 - t_) * eps, t, y) - (x - eps)) ** 2).flatten(1).mean(dim=-1).mean()


class Step:
    """One training step: loss, under autocast to bfloat16 if asked for, backward, AdamW, schedule, average.

    Args:
        net: the network.
        loss: the loss, random numbers included.
        lr: learning rate.
        betas: of AdamW.
        weight_decay: of all parameters.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: Callable[[], Tensor],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        self.net, self.loss = net, loss
        self.device = next(net.parameters()).device.type
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=lr, betas=betas, weight_decay=weight_decay)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(step / 2500, 1))
        self.ema = deepcopy(net).eval().requires_grad_(False)

    def __call__(self, autocast: bool) -> None:
        with torch.autocast(self.device, torch.bfloat16, enabled=autocast):
            loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        update_ema(self.ema, self.net, 0.9999)


@torch.no_grad()
def update_ema(ema: nn.Module, net: nn.Module, decay: float) -> None:
    averages = dict(ema.named_parameters())
    for name, parameter in net.named_parameters():
        averages[name].mul_(decay).add_(parameter.data, alpha=1 - decay)
