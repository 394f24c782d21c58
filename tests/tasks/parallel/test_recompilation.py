"""Compiled training: nothing is compiled after the first steps, blocks alike share graphs, and what `auto` means."""

from collections.abc import Callable

import jaxtyping
import pytest
import torch
from conftest import tiny_net, tiny_task, tiny_trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch._dynamo.utils import counters

from uvit_decay.callbacks import EMA
from uvit_decay.data import Digits
from uvit_decay.decay import SHORTCUTS
from uvit_decay.tasks import DiffusionTask, Task
from uvit_decay.tasks.base import Optimization
from uvit_decay.tasks.parallel.compilation import compile_net
from uvit_decay.tasks.parallel.sharding import Sharded

WARM = 3  # steps, with a validation in between


def forbid(trainer, *_):
    """Let anything that is compiled after the first steps be an error."""
    torch._dynamo.config.error_on_recompile = trainer.global_step >= WARM


@pytest.mark.parametrize("by_block", [False, True])
def test_nothing_is_compiled_after_the_first_steps(by_block, tmp_path, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    torch._dynamo.reset()
    task = tiny_task(compile=False)
    compile_net(task.net, "eager", by_block)
    options = {"max_steps": 9, "val_check_interval": 2, "check_val_every_n_epoch": None, "limit_val_batches": 2}
    with torch._dynamo.config.patch(error_on_recompile=False):
        watch = LambdaCallback(on_train_batch_end=forbid)
        trainer = tiny_trainer(tmp_path, EMA(0.9), watch, precision="bf16-mixed", **options)
        trainer.fit(task, Digits(32, device_batch_size=16))
    assert trainer.global_step == 9
    assert trainer.callback_metrics["val/loss"] > 0


def graphs(net, *inputs):
    """Return the number of graphs in a training step of `net`, by block; only a backend with AOT counts guards."""
    torch._dynamo.reset()
    counters.clear()
    compile_net(net, "aot_eager", by_block=True)
    for _ in range(2):
        net(*inputs).square().mean().backward()
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("schedule", "parts"), [("linear", 1), ("learnable", 1), ("hyper-2", 1), ("attnres", 2), ("dar", 2)]
)
def test_blocks_alike_share_a_graph_whatever_their_connections_and_number(schedule, parts, monkeypatch):
    """Attention over depth writes outside of the graphs, so that a block has one for each branch."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    x, t, y = torch.rand(4, 1, 8, 8), torch.rand(4), torch.arange(4)
    options = {"schedule": schedule, "alpha_min": 0.7 if SHORTCUTS[schedule].falls else 1.0}
    counts = [graphs(tiny_net(depth=depth, **options), x, t, y) for depth in (2, 12)]
    assert counts == [2 * parts] * 2  # with and without a skip


@pytest.mark.parametrize(("device", "triton", "expected"), [("cpu", 1, None), ("cuda", 1, True), ("cuda", None, None)])
def test_auto_compiles_by_block_on_gpus_with_triton_alone(device, triton, expected, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr("uvit_decay.tasks.base.compile_net", lambda net, backend, by_block: calls.append(by_block))
    monkeypatch.setattr("uvit_decay.tasks.base.find_spec", lambda name: triton)
    task = DiffusionTask(tiny_net())
    trainer = tiny_trainer(tmp_path)
    monkeypatch.setattr(type(trainer.strategy), "root_device", torch.device(device))
    task.trainer = trainer
    for _ in range(2):
        task.configure_model()
    assert calls == ([] if expected is None else [expected])


class _Scale(nn.Module):
    """A network of one number."""

    image_size, channels, num_classes, null_label, config = 4, 1, 0, False, {}

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize("strategy", ["auto", Sharded()], ids=["whole", "blocks"])
@torch._dynamo.config.patch(recompile_limit=8)  # torch's own
def test_training_validation_and_samples_of_any_number_all_run_compiled(strategy, tmp_path, monkeypatch):
    compiled, calls = [], []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable:
        compiled.append(graph)
        return lambda *inputs: calls.append(graph) or graph(*inputs)

    torch._dynamo.reset()
    backend._tags = ()  # as torch marks those that it registers; 2.9 reads it
    monkeypatch.setitem(torch._dynamo.backends.registry._COMPILER_FNS, "counting", backend)
    monkeypatch.setitem(torch._dynamo.backends.registry._BACKENDS, "counting", None)
    task = Task(_Scale(), Optimization(), compile="counting")
    task.trainer = tiny_trainer(tmp_path, strategy=strategy)
    task.configure_model()
    situations = [(grad, half, count) for grad in (True, False) for half in (True, False) for count in (32, 16, 5, 1)]
    for _ in range(2):
        for grad, half, count in situations:
            with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=half):
                task.net(torch.ones(count, 4))
    assert len(calls) == 2 * len(situations)
    assert 8 < len(compiled) < len(situations)  # other numbers share a graph
