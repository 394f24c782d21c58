"""Clipping of gradients before a fused AdamW: the numbers of torch's own clipping and of an unfused AdamW."""

import copy
from functools import partial

import pytest
import torch
from conftest import state, tiny_net, tiny_task, tiny_trainer
from gloo import on_two_processes
from lightning.pytorch import Callback
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import AdamW

from uvit_decay.data import Digits
from uvit_decay.tasks.parallel.sharding import Sharded, full_tensor

CLIP = {"norm": (clip_grad_norm_, 0.05), "value": (clip_grad_value_, 1e-3)}
STRATEGIES = {"fsdp": Sharded, "ddp": lambda: "ddp"}


def train_clipped(folder, algorithm, *callbacks, **options):
    task = tiny_task(tiny_net(schedule="learnable"))
    options |= {"gradient_clip_val": CLIP[algorithm][1], "gradient_clip_algorithm": algorithm}
    trainer = tiny_trainer(folder, *callbacks, max_steps=4, log_every_n_steps=1, **options)
    trainer.fit(task, Digits(32))
    return task, trainer


class Torch(Callback):
    """The same steps by torch alone, on copies of weights and gradients: clip, then an AdamW, fused or not."""

    def __init__(self, algorithm: str, fused: bool) -> None:
        self.clip, self.bound = CLIP[algorithm]
        self.fused, self.norms, self.logged = fused, [], []

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

    def on_train_batch_end(self, trainer, *_) -> None:
        self.logged.append(float(trainer.callback_metrics["train/grad_norm"]))


@pytest.mark.parametrize(
    ("algorithm", "precision", "fused"),
    [("norm", "32-true", True), ("norm", "bf16-mixed", False), ("value", "bf16-mixed", True)],
)
def test_clipping_is_that_of_torch(tmp_path, algorithm, precision, fused):
    torchs = Torch(algorithm, fused)
    task, trainer = train_clipped(tmp_path, algorithm, torchs, precision=precision)
    assert trainer.optimizers[0].param_groups[0]["fused"]
    for (name, ours), theirs in zip(task.net.named_parameters(), torchs.net.parameters(), strict=True):
        # Each weight goes by up to a rate of 4e-4; to the bit the kernel must be the same, too.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if fused else 3e-8, msg=name)
    if algorithm == "norm":
        assert torchs.logged == [float(norm) for norm in torchs.norms]  # before clipping
        assert min(torchs.logged) > CLIP["norm"][1]


def on_a_rank(folder, rank):
    """Train runs with clipping, save their weights, and return their norms."""
    norms = {}
    for algorithm in CLIP:
        for name, strategy in STRATEGIES.items():
            task, trainer = train_clipped(folder, algorithm, devices=2, strategy=strategy())
            weights = {key: full_tensor(value).clone() for key, value in state(task).items()}
            torch.save(weights, folder / f"{algorithm} {name} {trainer.global_rank}.pt")
            norms[f"{algorithm} {name}"] = float(trainer.callback_metrics["train/grad_norm"])
    return norms


@pytest.fixture(scope="module")
def ranks(programs, tmp_path_factory):
    """Return the folder of all runs, and what each rank found in them."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, on_two_processes(programs, partial(on_a_rank, folder), folder)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", CLIP)
def test_clipping_of_two_processes_and_of_shards_is_that_of_one(ranks, tmp_path, algorithm):
    folder, (ours, theirs) = ranks
    assert ours == theirs
    task, trainer = train_clipped(tmp_path, algorithm)
    norm = float(trainer.callback_metrics["train/grad_norm"])
    for strategy in STRATEGIES:
        assert ours[f"{algorithm} {strategy}"] == pytest.approx(norm)
        first, second = (torch.load(folder / f"{algorithm} {strategy} {rank}.pt") for rank in range(2))
        for key, value in state(task).items():
            assert torch.equal(first[key], second[key]), key
            torch.testing.assert_close(first[key], value, rtol=0, atol=2e-5, msg=key)
