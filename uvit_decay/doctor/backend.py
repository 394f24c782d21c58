"""A block of the network on the accelerator and on the CPU: some backends compute wrong gradients without an error."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from uvit_decay.doctor.report import Finding, Run
from uvit_decay.nn.intermediates import HasIntermediates, layer_blocks
from uvit_decay.runtime.precision import computing
from uvit_decay.tasks import Task

IMAGES = 2  # of the forward and backward pass
NOISE = 0.05  # standard deviation of the change of all weights: gates that start at 0 would hide gradients
MOST = 1e-3  # largest difference of float32 results, relative to the largest number of the CPU's result
CPU = torch.device("cpu")


def check_backend(run: Run) -> Iterator[Finding]:
    """Compare the accelerator of a run with the CPU; a network without blocks is not compared."""
    device = run.trainer.strategy.root_device
    if device.type != "cpu" and layer_blocks(run.task.net):
        yield compare_with_cpu(run.task, device)


def compare_with_cpu(task: Task, device: torch.device) -> Finding:
    """Compare output and gradients of the first block of a task's network, in float32, on a device and on the CPU."""
    net = task.net
    block = layer_blocks(net)[0]
    args, options = _record_inputs(task, block)
    differences = block_differences(block, args, options, device)
    names = {module: name for name, module in net.named_modules()}
    subject = f"{names[block]} on {device} and on the CPU"
    wrong = [f"{name} ({value:.2g})" for name, value in differences.items() if not value <= MOST]  # NaN, too
    if wrong:
        text = f"{subject} differ in float32, relative to the largest number: {', '.join(wrong)}"
        return Finding("error", "backend", text, "use another version of torch, or --trainer.accelerator cpu")
    largest = max(differences.values())
    return Finding("ok", "backend", f"{subject}: output and gradients agree, largest relative difference {largest:.1g}")


def _record_inputs(task: Task, block: nn.Module) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return positional and keyword arguments with which the network of a task calls one of its blocks first."""
    net: HasIntermediates = task.net
    random = torch.Generator().manual_seed(0)
    images = torch.randn(IMAGES, net.channels, net.image_size, net.image_size, generator=random)
    conditions: list[Tensor] = []
    if task.path is not None:  # a denoiser
        conditions.append(torch.full((IMAGES,), 0.5))
        if net.num_classes:
            conditions.append(torch.zeros(IMAGES, dtype=torch.int64))
    calls: list[tuple[Sequence[Any], Mapping[str, Any]]] = []
    hook = block.register_forward_pre_hook(lambda _, args, options: calls.append((args, options)), with_kwargs=True)
    try:
        with torch.no_grad():
            states = net.forward_intermediates(images, *conditions)
            while not calls:
                next(states)
    finally:
        hook.remove()
    return calls[0]


def block_differences(
    block: nn.Module, args: Sequence[Any], options: Mapping[str, Any], device: torch.device
) -> dict[str, float]:
    """Return the differences of a block on a device from the block on the CPU, by name.

    A difference is the largest one of a tensor, divided by the largest number of the CPU's tensor. The tensors are the
    output and the gradients of parameters and of floating-point arguments. The block itself is not changed.

    Args:
        block: a module on the CPU, which returns a tensor.
        args: its positional arguments.
        options: its keyword arguments.
        device: the device.
    """
    block = copy.deepcopy(block)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += NOISE * torch.randn(parameter.shape, generator=random)
    expected = _compute(block, args, options, CPU)
    differences = {}
    for name, ours in _compute(block, args, options, device).items():
        theirs = expected[name]
        largest = float(theirs.abs().max())
        differences[name] = float((ours - theirs).abs().max()) / (largest or 1.0)
    return differences


def _compute(
    block: nn.Module, args: Sequence[Any], options: Mapping[str, Any], device: torch.device
) -> dict[str, Tensor]:
    """Return output and gradients of a copy of a block on a device, as tensors on the CPU, by name."""
    block = copy.deepcopy(block).requires_grad_().to(device)
    args = move_data_to_device(copy.deepcopy(args), device)
    options = move_data_to_device(copy.deepcopy(options), device)
    leaves = {f"parameter {name}": parameter for name, parameter in block.named_parameters()}
    for i, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            leaves[f"argument {i}"] = value.requires_grad_()
    with computing(device, "float32"):
        output = block(*args, **options)
        random = torch.Generator().manual_seed(1)
        weights = torch.randn(output.shape, generator=random).to(device)
        gradients = torch.autograd.grad((weights * output).sum(), list(leaves.values()), allow_unused=True)
    found = {"output": output.detach().cpu()}
    for name, gradient in zip(leaves, gradients, strict=True):
        if gradient is not None:
            found[f"gradient of {name}"] = gradient.cpu()
    return found
