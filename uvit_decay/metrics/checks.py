"""Input checks shared by the feature metrics."""

from __future__ import annotations

from torch import Tensor

from uvit_decay.runtime.errors import UserError


def check_features(metric: str, real: Tensor, fake: Tensor) -> None:
    """Raise a UserError unless two sets of features, (n, d) and (m, d), are as wide as each other and finite."""
    if real.shape[1] != fake.shape[1]:
        raise UserError(
            f"{metric}: the real features have {real.shape[1]} numbers an image, the fake ones {fake.shape[1]}; "
            "extract both with the same network"
        )
    for side, x in (("real", real), ("fake", fake)):
        if not x.isfinite().all():
            raise UserError(f"{metric}: the {side} features hold NaN or infinity")
