"""A small masked autoencoder of digits."""

import torch

from uvit_decay.nn import MAE
from uvit_decay.tasks import MAETask
from uvit_decay.tasks.optim.options import Optimization

OPTIM = Optimization(betas=(0.9, 0.95), blr=8e-3, weight_decay=0.05, decay_on="matrices", warmup_epochs=0.1)


def small_mae(**options) -> MAE:
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": 2, "heads": 2, "decoder_dim": 16, "decoder_depth": 2, "decoder_heads": 2}
    return MAE(8, 2, 1, **{**sizes, "alpha_min": 0.7, "wiring": "decayed", "pixels": "unit", **options})


def mae_task(net: MAE | None = None, mask_ratio: float = 0.75, **options) -> MAETask:
    return MAETask(net or small_mae(), mask_ratio, OPTIM, **options)
