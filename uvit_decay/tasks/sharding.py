"""FSDP: of every weight, gradient, optimizer state and average, each process holds only its part.

A block's weights are gathered when it runs and freed after it (PyTorch's `fully_shard`, FSDP2). Checkpoints are whole:
the same files that one device or DDP writes and reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from uvit_decay.nn.tap import Tapped


def spare_copies() -> None:
    """Let `ddp`, and `auto` on several devices, send no buffers at each step: here they are constant.

    Nor are gradients copied into the buckets that they are sent in.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before torch 2.15
    spared = {buffers: False, "gradient_as_bucket_view": True}
    StrategyRegistry.register("ddp", DDPStrategy, "without needless copies", override=True, **spared)


class Sharded(DDPStrategy):
    """DDP, but for the network, which is cut into shards where DDP would wrap it.

    So whatever is done in which order, a resumption too, is as under DDP. Lightning's FSDPStrategy is of FSDP1 and
    needs GPUs; its ModelParallelStrategy loads a checkpoint, key by key, before the task may refuse it.
    """

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING or not is_sharded(self.lightning_module.net):
            super().setup(trainer)
        else:  # validated after it was trained: it is where it should be
            self.accelerator.setup(trainer)
            self.setup_precision_plugin()

    def configure_ddp(self) -> None:
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        shard(self.lightning_module.net, mesh, bf16=self.precision_plugin.precision == "bf16-mixed")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return gathered(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        return {**state, "state": {i: gathered(values) for i, values in state["state"].items()}}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, stored in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            state = {i: _cut_like(parameters[i], values) for i, values in stored["state"].items()}
            optimizer.load_state_dict({**stored, "state": state})

    def teardown(self) -> None:
        """Shards stay on their devices, where DDP would bring the network back to the CPU."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def shard(net: nn.Module, mesh: DeviceMesh, bf16: bool = False) -> None:
    """Keep of each parameter the rows of this process; the values are those of process 0, as under DDP.

    Blocks are gathered one at a time, and a network without stages at once. With `bf16`, for training under autocast to
    it, blocks of linear maps alone are gathered in it: autocast would round them to the same numbers, but of twice the
    bytes, and keep its copies of all blocks until the end of the step.
    """
    if is_sharded(net):
        return
    for value in net.state_dict().values():
        distributed.broadcast(value, 0)
    half = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*_blocks(net), net):
        policy = half if bf16 and module is not net and _is_linear(module) else MixedPrecisionPolicy()
        # The net, too: by default it stays gathered after a forward pass, and without a backward pass for ever.
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def _blocks(net: nn.Module) -> list[nn.Module]:
    stages = net.stages if isinstance(net, Tapped) else ()
    return [net.get_submodule(stage.name) for stage in stages if stage.kind != "embeddings"]


def compile_net(net: nn.Module, backend: str, sharded: bool) -> None:
    """Compile in place, before `shard`; where it will be `sharded`, each block alone: no graph can hold the gathering.

    Training, validation and samples get graphs of their own: with and without gradients, with and without autocast, for
    the first number of pictures, any other, few, and one. torch allows a function 8 in all, which all blocks share
    although each has its own alphas, and runs what exceeds them uncompiled.
    """
    parts = (_blocks(net) or [net]) if sharded else [net]
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 16 * len(parts))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)
    for part in parts:
        part.compile(backend=backend)


def _is_linear(module: nn.Module) -> bool:
    """Whether all its parameters are those of linear maps: norms are kept in float32."""
    owners = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
    return all(isinstance(part, nn.Linear) for part in owners)


def is_sharded(net: nn.Module) -> bool:
    return isinstance(net, FSDPModule)


def original_class(net: nn.Module) -> type[nn.Module]:
    """`fully_shard` gives a network a class of its own; this is the one that it was built as."""
    return next(kind for kind in type(net).__mro__ if not issubclass(kind, FSDPModule))


def local(tensor: Tensor) -> Tensor:
    """This process's part, in place; all of a tensor that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every process; all of them must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(parameter: Tensor, value: Tensor) -> Tensor:
    """`value`, which every process has whole, on the parameter's device and cut as the parameter is."""
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _cut_like(parameter: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The moments of an optimizer are shaped as their parameter, its count of steps is a scalar."""
    return {key: value if value.dim() == 0 else like(parameter, value) for key, value in state.items()}


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of sharded tensors the whole, on the CPU of process 0 only, one after the other; others as they are."""
    kept = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            kept[name] = tensor
            continue
        value = tensor.full_tensor()
        if tensor.device_mesh.get_rank() == 0:
            kept[name] = value.cpu()
    return kept


@contextmanager
def whole(task: LightningModule) -> Iterator[None]:
    """Within, `task.net` is an ordinary network with the same weights, on every process.

    Each may then call it as often as its share of the samples needs; a sharded network must be called by all alike.
    """
    sharded = task.net
    if not is_sharded(sharded):
        yield
        return
    with torch.device("meta"):
        net = original_class(sharded)(**sharded.config)
    net.load_state_dict({name: full(value) for name, value in sharded.state_dict().items()}, assign=True)
    task.net = net.train(sharded.training)
    try:
        yield
    finally:
        task.net = sharded
