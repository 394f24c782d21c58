"""Raw pixels as features: the baseline that features of small pictures must beat."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.nn.intermediates import Layer
from uvit_decay.runtime.errors import UserError, check_whole


class Pixels(nn.Module):
    """A network whose only layer is the image itself, values in [-1, 1] in one token of dim = channels * size^2.

    Args:
        size: WIDTHxHEIGHTxCHANNELS of the images, such as 32x32x3; width and height are equal.
    """

    layers = (Layer("pixels", "embeddings"),)
    num_prefix_tokens, num_classes, null_label, class_token = 0, 0, False, False

    def __init__(self, size: str) -> None:
        super().__init__()
        found = re.fullmatch(r"(\d{1,5})x(\d{1,5})x(\d{1,5})", size)
        if not found or found[1] != found[2]:
            raise UserError(f"pixels:{size}: the size of square images is needed, such as pixels:32x32x3")
        self.image_size, self.channels = int(found[1]), int(found[3])
        check_whole(1, 2**16, width=self.image_size, channels=self.channels)
        self.dim = self.channels * self.image_size**2

    def forward_intermediates(self, x: Float[Tensor, "b c h w"]) -> Iterator[Float[Tensor, "b 1 d"]]:
        """Yield the pixels of each image as one token."""
        yield x.flatten(1)[:, None]
