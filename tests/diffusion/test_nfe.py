"""The number of network evaluations, counted and promised, and the number of compilations."""

import torch
from small_source import NET, images, source
from test_loss import Toy
from torch._dynamo.testing import CompileCounter

from uvit_decay.diffusion.denoiser import CompiledNet, NFECounter
from uvit_decay.diffusion.sampling import Sampling


def test_counting_evaluations_changes_nothing():
    counter = NFECounter(NET)
    sampled = images(Sampling("sit-ode", 3, guidance=2.0), [0, 1], [0, 1], of=source(counter))
    assert counter.nfe == 2 * 2 * 6
    assert torch.equal(sampled, images(Sampling("sit-ode", 3, guidance=2.0), [0, 1], [0, 1]))
    counter = NFECounter(NET)
    images(Sampling("dopri5"), [0, 1], [0, 1], of=source(counter))
    assert 20 < counter.nfe / 2 < 400


def test_last_batches_and_guidance_at_some_times_share_one_graph():
    torch._dynamo.reset()
    toy, counter = Toy(), CompileCounter()
    for guided, labels in (({}, None), ({"guidance": 2.0, "guidance_interval": (0.4, 0.8)}, [0, 1, 2, 2, 1, 0])):
        sampling, options = Sampling("ddim", 4, **guided), dict(indices=range(6), labels=labels, batch_size=4)
        compiled = images(sampling, **options, of=source(CompiledNet(toy, counter)))
        torch.testing.assert_close(compiled, images(sampling, **options, of=source(toy)))
    assert counter.frame_count == 2, "without labels and with; batches of 4 and 2, with guidance of 8 and 4"
