r"""Controls of the study of long skips: SiTs with a part of what `skip_scale stream:0.8` does (docs/results.md).

A factor c of a long skip scales more than a state. Under Adam, the layer W of the skip in effect also starts c times as
large and learns c times as fast, and `stream` scales the bias of W by a factor d. Each class leaves one of these out:

    python train.py fit --config benchmarks/studies/small_sit.yaml --trust benchmarks.studies.skip_controls \
        --model.net benchmarks.studies.skip_controls.SkipStart --model.net.alpha_min 1.0 \
        --model.net.skip_scale stream:0.8

Both take the arguments of SiT, with `wiring decayed` and a `skip_scale` of fixed factors.
"""

from typing import Any

import torch

from uvit_decay.nn import SiT
from uvit_decay.nn.long_skips import LongSkips


class SkipStart(SiT):
    """SiT whose long skips start c times as large and have no factor: x + W s + b, with c W0 as the initial W."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        factors = self.long_skips.scales[0]
        with torch.no_grad():
            for block, c in zip(self.dec_blocks, factors, strict=True):
                block.skip.weight.mul_(c)
        self.long_skips = None


class SkipWithoutBias(SiT):
    """SiT whose long skips have the factors c but no factor of the bias: x + c W s + b."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        factors = self.long_skips.scales[0].tolist()
        tokens = self.x_embedder.tokens
        self.long_skips = LongSkips([factors, [1.0] * len(factors)], 0, tokens)
