"""Random weights of a small vision transformer of timm."""

import timm
import torch
from torch import nn

NAME = "test_vit"  # of timm's own tests: 160 px, 64 wide, 6 deep


def weights(name: str = NAME, **options: object) -> nn.Module:
    """Return a model of timm in eval mode with random weights."""
    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval()
    for value in model.parameters():
        nn.init.normal_(value, std=0.05)
    return model
