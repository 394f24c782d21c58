"""A compiled network makes the same images, and is compiled once."""

import torch
from small_source import CLASSES, SHAPE, images, source
from torch import nn
from torch._dynamo.testing import CompileCounter

from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.diffusion.wrappers import CompiledNet


class Toy(nn.Module):
    """A network without jaxtyping's checks, which cannot be compiled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.labels = nn.Conv2d(SHAPE[0], SHAPE[0], 3, padding=1), nn.Embedding(CLASSES + 1, SHAPE[0])

    def forward(self, x, t, y):
        shift = t[:, None] if y is None else t[:, None] + self.labels(y)
        return self.conv(torch.tanh(x) + shift[:, :, None, None])


def test_last_batches_and_guidance_at_some_times_share_one_graph():
    torch._dynamo.reset()
    toy, counter = Toy(), CompileCounter()
    for guided, labels in (({}, None), ({"guidance": 2.0, "guidance_interval": (0.4, 0.8)}, [0, 1, 2, 2, 1, 0])):
        sampling, options = Sampling("ddim", 4, **guided), dict(indices=range(6), labels=labels, batch_size=4)
        compiled = images(sampling, **options, of=source(CompiledNet(toy, counter)))
        torch.testing.assert_close(compiled, images(sampling, **options, of=source(toy)))
    assert counter.frame_count == 2, "without labels and with; batches of 4 and 2, with guidance of 8 and 4"
