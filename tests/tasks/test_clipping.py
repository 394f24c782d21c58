"""Clipping of gradients before a fused AdamW: the numbers of torch's own clipping and of an unfused AdamW."""

import copy

import pytest
import torch
from lightning.pytorch import Callback
from long_runs import CLIP, clipped
from torch.optim import AdamW


class Torch(Callback):
    """The same steps by torch alone, on copies of weights and gradients: clip, then an AdamW, fused or not."""

    def __init__(self, algorithm: str, fused: bool) -> None:
        self.clip, self.bound = CLIP[algorithm]
        self.fused, self.norms = fused, []

    def on_fit_start(self, trainer, task) -> None:
        self.net, optim = copy.deepcopy(task.net), task.optim
        self.optimizer = AdamW(self.net.parameters(), optim.lr, optim.betas, weight_decay=0.03, fused=self.fused)

    def on_before_optimizer_step(self, trainer, task, optimizer) -> None:
        (group,) = self.optimizer.param_groups
        group["lr"] = optimizer.param_groups[0]["lr"]
        for ours, theirs in zip(self.net.parameters(), task.net.parameters(), strict=True):
            ours.grad = theirs.grad.clone()
        self.norms.append(self.clip(self.net.parameters(), self.bound))
        self.optimizer.step()


class Norms(Callback):
    def __init__(self) -> None:
        self.values = []

    def on_train_batch_end(self, trainer, *_) -> None:
        self.values.append(float(trainer.callback_metrics["train/grad_norm"]))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("algorithm", CLIP)
def test_clipping_is_that_of_torch(tmp_path, algorithm, precision, fused):
    torchs, norms = Torch(algorithm, fused), Norms()
    task, trainer = clipped(tmp_path, algorithm, torchs, norms, precision=precision)
    assert trainer.optimizers[0].param_groups[0]["fused"]
    for (name, ours), theirs in zip(task.net.named_parameters(), torchs.net.parameters(), strict=True):
        # Each weight goes by up to a rate of 4e-4; to the bit the kernel must be the same, too.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if fused else 3e-8, msg=name)
    if algorithm == "norm":
        assert norms.values == [float(norm) for norm in torchs.norms]  # before clipping
        assert min(norms.values) > CLIP["norm"][1]
