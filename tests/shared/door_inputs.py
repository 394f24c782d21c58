"""Inputs that networks refuse in their forward pass, apart from the values of later calls."""

import torch

from uvit_decay.nn import MAE, ResNet, SiT, UViT, ViT
from uvit_decay.runtime.errors import UserError

SIZES = {"image_size": 8, "patch_size": 2, "channels": 1, "dim": 16, "depth": 2, "heads": 2}
DECODER = {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2}
X = torch.zeros(2, 1, 8, 8)
T = torch.zeros(2)
Y = torch.zeros(2, dtype=torch.int64)
NOISE = torch.rand(2, 16)
IMAGES = {
    "another size": torch.zeros(2, 1, 16, 16),
    "other channels": torch.zeros(2, 3, 8, 8),
    "one image": X[0],
}


def accepted_inputs() -> list[str]:
    """Return a line for each input that is not refused by a UserError that begins with the network and the argument."""
    cases = []
    for net in (UViT(**SIZES, num_classes=2), SiT(**SIZES, num_classes=2)):
        cases += [(net, "x", kind, (x, T, Y)) for kind, x in IMAGES.items()]
        cases.append((net, "t", "levels", (X, T + 999, Y)))
    for net in (ViT(**SIZES, num_classes=2, pixels="unit"), ResNet(8, 1, 4, num_classes=2, pixels="unit")):
        cases += [(net, "x", kind, (x,)) for kind, x in IMAGES.items()]
    mae = MAE(**SIZES, **DECODER, pixels="unit")
    cases += [(mae, "x", kind, (x, NOISE)) for kind, x in IMAGES.items()]
    lines = []
    for net, name, kind, inputs in cases:
        start = f"{type(net).__name__}: {name} must"
        try:
            net(*inputs)
            lines.append(f"{start} ({kind}): accepted")
        except Exception as error:
            if type(error) is not UserError or not str(error).startswith(start):
                lines.append(f"{start} ({kind}): {type(error).__name__} {error}"[:300])
    return lines
