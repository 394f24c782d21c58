"""Label consistency: how often a classifier recognises the class for which a sample was generated."""

from __future__ import annotations

from jaxtyping import Float, Int64
from torch import Tensor

from uvit_decay.terminal.errors import require_shape
from uvit_decay.terminal.typed import check_types


@check_types
def label_consistency(logits: Float[Tensor, "n k"], labels: Int64[Tensor, " n"]) -> float:
    """Return the share of images, in [0, 1], whose largest logit has the index of their label.

    For samples and the labels that they were generated for it is the label consistency, for real images and their
    labels the accuracy of the classifier.
    """
    require_shape(logits.shape[:1], labels=labels)
    right = logits.argmax(1) == labels
    return float(right.double().mean())
