"""DDP: every process holds the whole network, and gradients are averaged."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from uvit_decay.runtime.distributed import TRAINING, Processes, choose_interface
from uvit_decay.tasks.own_parameters import own_parameters
from uvit_decay.terminal.errors import UserError

UNUSED = re.compile(r"indices which did not receive grad for rank \d+: (\d+)")  # in a message of DDP's reducer
PLACES = {"data.path", "data.test_path"}  # settings that may differ between nodes with copies of the images


def register_ddp() -> None:
    """Make `Replicated` the strategy of the names `ddp`, and `auto` on several devices."""
    StrategyRegistry.register("ddp", Replicated, "without needless copies", override=True)


class Replicated(DDPStrategy):
    """Lightning's DDP strategy without needless copies, with the timeout of training and gloo's interface.

    Buffers are not broadcast at each step: they are constant, or statistics of batch norms, which `ClassifyTask`
    averages. Gradients are views of the communication buckets.

    Args:
        timeout: how long a process waits for another one, at the start and in a collective.
        options: further options of DDPStrategy.

    Raises:
        UserError: processes have different settings, or resume from different checkpoints.
    """

    def __init__(self, *, timeout: timedelta = TRAINING, **options: Any) -> None:
        given = {"gradient_as_bucket_view": True}
        if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:  # from torch 2.15 on
            given["forward_sync_buffers"] = False
        else:
            given["broadcast_buffers"] = False
        super().__init__(timeout=timeout, **{**given, **options})

    def setup_distributed(self) -> None:
        choose_interface(self.cluster_environment.main_address)
        super().setup_distributed()
        task = self.lightning_module
        settings = {name: str(value) for name, value in task.settings.items() if name not in PLACES}
        settings["ckpt_path"] = str(task.start)
        Processes.current().check_same("the flag", settings)


def check_gradients(task: LightningModule, optimizer: Optimizer) -> None:
    """Raise a UserError if DDP waits for a gradient that this step, or its last micro-batch, did not compute.

    Gradients are averaged in the backward pass of the last micro-batch. Without this check torch reports the missing
    gradient in the next step, and names no parameter.

    Args:
        task: the task, after the backward pass of a step.
        optimizer: its optimizer.
    """
    wrapper = task.trainer.strategy.model
    if not isinstance(wrapper, DistributedDataParallel) or wrapper.find_unused_parameters or wrapper.static_graph:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                raise UserError(explain_missing_gradient(_find_name(task, parameter)))
    try:
        wrapper._check_reducer_finalized()
    except RuntimeError as error:
        match = UNUSED.search(str(error))
        if match is None:
            raise
        trained = [parameter for parameter in wrapper.module.parameters() if parameter.requires_grad]
        name = _find_name(task, trained[int(match[1])])
        raise UserError(explain_missing_gradient(name)) from error


def _find_name(task: LightningModule, parameter: nn.Parameter) -> str:
    """Return the name of a parameter in checkpoints, or as it is in the task."""
    named = [*own_parameters(task), *task.named_parameters()]
    return next(name for name, other in named if other is parameter)


def explain_missing_gradient(name: str) -> str:
    """Return the message about a trained parameter without a gradient in a run of several processes."""
    return (
        f"{name} has no gradient in this step or in its last micro-batch, and several processes average the gradients "
        "of all trained parameters: use it in the loss of every micro-batch, or freeze it with requires_grad_(False)"
    )
