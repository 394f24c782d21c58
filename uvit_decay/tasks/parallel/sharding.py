"""FSDP: weights, gradients, optimizer states and EMA weights are sharded over the ranks.

The weights of a block are gathered when it runs and freed afterwards (PyTorch's `fully_shard`, FSDP2). Checkpoints hold
full tensors: the same files that one device or DDP writes and reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from uvit_decay.checkpoint.io import HOME
from uvit_decay.files.instantiate import Spec, check_arguments
from uvit_decay.nn.intermediates import layer_blocks
from uvit_decay.tasks.own_parameters import own_tensors
from uvit_decay.tasks.parallel.ddp import Replicated, explain_missing_gradient
from uvit_decay.terminal.errors import UserError


class Sharded(Replicated):
    """Lightning's DDP strategy, except that the network is sharded where DDP would wrap it.

    Hooks run in the same order as with DDP, in resumption too. Lightning's FSDPStrategy implements FSDP1 and needs
    GPUs. Its ModelParallelStrategy loads a checkpoint key by key before the task can refuse it.
    """

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING or not isinstance(self.lightning_module.net, FSDPModule):
            super().setup(trainer)
        else:  # validation after training: the network is sharded already
            self.accelerator.setup(trainer)
            self.setup_precision_plugin()

    def configure_ddp(self) -> None:
        """Shard the network; the task's own parameters and buffers are copied from rank 0."""
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        for tensor in own_tensors(self.lightning_module):
            distributed.broadcast(tensor.detach(), 0)
        shard(self.lightning_module.net, mesh, bf16=self.precision_plugin.precision == "bf16-mixed")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return gather(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        moments = {i: gather(values) for i, values in state["state"].items()}
        return {**state, "state": moments}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, stored in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters: list[Tensor] = []
            for group in optimizer.param_groups:
                parameters += group["params"]
            state = {i: _shard_moments(parameters[i], values) for i, values in stored["state"].items()}
            optimizer.load_state_dict({**stored, "state": state})

    def teardown(self) -> None:
        """Tear down all parts, but leave the shards on their devices; DDP would move the network to the CPU."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _shard_moments(parameter: Tensor, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the moments of a parameter, sharded as it is; step counts, which are scalars, are not sharded."""
    found = dict(moments)
    for name, value in moments.items():
        if value.dim() > 0:
            found[name] = shard_like(parameter, value)
    return found


def average_gradients(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Average the gradients of replicated parameters over the ranks, in place; all ranks must call this.

    DistributedDataParallel averages by itself, but it does not wrap a task whose network is sharded.
    """
    for name, parameter in named:
        if parameter.grad is None:
            raise UserError(explain_missing_gradient(name))
        distributed.all_reduce(parameter.grad)
        parameter.grad /= distributed.get_world_size()


def shard(net: nn.Module, mesh: DeviceMesh, bf16: bool = False) -> None:
    """Shard each parameter by rows over the ranks of `mesh`; the values are copied from rank 0, as under DDP.

    Blocks are gathered one at a time; a network without known layers is gathered as a whole. With `bf16`, for training
    under autocast to bfloat16, blocks with only linear layers are gathered in bfloat16. The values equal the values of
    autocast, which would gather twice the bytes and keep its copies of all blocks until the end of the step.
    """
    if isinstance(net, FSDPModule):
        return
    for value in net.state_dict().values():
        distributed.broadcast(value, 0)
    half = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*layer_blocks(net), net):
        in_half = bf16 and module is not net and _is_linear(module)
        policy = half if in_half else MixedPrecisionPolicy()
        # By default the network itself would stay gathered from the forward to the backward pass, if there is one.
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def _is_linear(module: nn.Module) -> bool:
    """Return whether all parameters belong to linear layers; norms are kept in float32."""
    for part in module.modules():
        has_parameters = next(part.parameters(recurse=False), None) is not None
        if has_parameters and not isinstance(part, nn.Linear):
            return False
    return True


def original_class(net: nn.Module) -> type[nn.Module]:
    """Return the class with which the network was built; `fully_shard` replaces it by a subclass."""
    return next(kind for kind in type(net).__mro__ if not issubclass(kind, FSDPModule))


def skeleton(net: nn.Module, changed: Mapping[str, Any] | None = None) -> nn.Module:
    """Return a network on the meta device with the arguments of this one, updated by `changed`."""
    spec = Spec.of(original_class(net), {**net.config, **(changed or {})})
    with torch.device("meta"):
        return original_class(net)(**check_arguments(spec, HOME, "the network"))


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard, which shares the memory of the tensor, or the tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded tensor, on every rank; all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return `value`, which is full on every rank, on the parameter's device and sharded as the parameter is."""
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def gather(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather sharded tensors one by one to the CPU of rank 0; all ranks must call this.

    Rank 0 gets all tensors. Other ranks get the tensors that are not sharded, which are returned unchanged everywhere.
    """
    found = {}
    for name, tensor in tensors.items():
        value = full_tensor(tensor)
        if value is tensor:
            found[name] = tensor
        elif tensor.device_mesh.get_rank() == 0:
            found[name] = value.cpu()
    return found


@contextmanager
def unsharded_network(task: LightningModule) -> Iterator[None]:
    """Replace a sharded `task.net` within the context by an ordinary network with the same weights, on every rank.

    All ranks must call a sharded network equally often. Within the context, they need not: ranks may have different
    shares of the samples.
    """
    sharded = task.net
    if not isinstance(sharded, FSDPModule):
        yield
        return
    net = skeleton(sharded)
    state = {name: full_tensor(value) for name, value in sharded.state_dict().items()}
    net.load_state_dict(state, assign=True)
    task.net = net.train(sharded.training)
    try:
        yield
    finally:
        task.net = sharded
