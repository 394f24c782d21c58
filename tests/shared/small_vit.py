"""Small vision transformers of digits, and tasks that classify with them."""

import torch

from uvit_decay.data.batches import Batch
from uvit_decay.nn import ViT
from uvit_decay.tasks import ClassifyTask
from uvit_decay.tasks.optim.options import Optimization

FINE_TUNING = Optimization(
    betas=(0.9, 0.999), blr=8e-3, weight_decay=0.05, decay_on="layers", layer_decay=0.65, warmup_epochs=0.1
)
PROBE = Optimization(blr=8.0, weight_decay=0.0, optimizer="lars", warmup_epochs=0.1)


def small_vit(**options) -> ViT:
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 2, "channels": 1, "dim": 16, "depth": 2, "heads": 2, "num_classes": 10}
    return ViT(**{**sizes, "alpha_min": 0.7, "norm": False, "pixels": "unit", **options})


def fine_tuning(net: ViT | None = None, **options) -> ClassifyTask:
    options = {"drop_path": 0.2, "mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1, "optim": FINE_TUNING, **options}
    return ClassifyTask(net or small_vit(pool="mean"), **options)


def linear_probe(net: ViT | None = None, **options) -> ClassifyTask:
    return ClassifyTask(net or small_vit(batch_norm=True), frozen=True, **{"optim": PROBE, **options})


def batch(count=8, number=3, first=0, total=16):
    """Return a part of global batch `number`: random images with labels."""
    random = torch.Generator().manual_seed(0)
    images, labels = torch.rand(total, 1, 8, 8, generator=random), torch.randint(10, (total,), generator=random)
    return Batch(images[first : first + count], labels[first : first + count], number, first, total)
