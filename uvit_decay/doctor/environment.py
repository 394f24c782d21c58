"""Checks of the environment of a run: versions, devices, processes, images, and weights of other projects."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
from huggingface_hub import try_to_load_from_cache
from lightning.pytorch import Callback

from uvit_decay.callbacks.generation_metrics import GenerationMetrics
from uvit_decay.data import ImageData
from uvit_decay.doctor.report import Finding, Level, Plan, gib
from uvit_decay.runtime.distributed import find_launcher

PACKAGES = ("torch", "lightning", "numpy", "diffusers")
DRIVER = Path("/proc/driver/nvidia/version")


def list_versions(run: Plan) -> Iterator[Finding]:
    """Report the versions of Python and of the main packages."""
    versions = [f"python {platform.python_version()}"]
    for name in PACKAGES:
        versions.append(f"{name} {version(name)}")
    yield Finding("ok", "versions", ", ".join(versions))


def check_devices(run: Plan) -> Iterator[Finding]:
    """Report the devices of this node, their memory and the precision of training."""
    device = run.trainer.strategy.root_device
    count = run.trainer.num_devices
    if device.type == "cuda":
        text = f"{count} of {torch.cuda.device_count()} GPUs, {torch.cuda.get_device_name(device)}"
    else:
        text = f"{count} process{'es' * (count > 1)} on {os.cpu_count()} CPU cores"
    yield Finding("ok", "devices", f"{text}, {gib(memory_limit(device))}, trains in {run.trainer.precision}")
    if DRIVER.exists() and not torch.accelerator.is_available():
        text = "this machine has an NVIDIA driver, but torch finds no GPU"
        yield Finding("warning", "devices", text, "install torch for CUDA, or look at CUDA_VISIBLE_DEVICES")


def list_ranks(run: Plan) -> Iterator[Finding]:
    """Report the number of processes and their launcher; `check_nodes` has compared the number with the flags."""
    trainer = run.trainer
    started, launcher = find_launcher()
    if started <= 1:
        launcher = "Lightning"
    nodes = f"{trainer.num_nodes} node{'s' * (trainer.num_nodes > 1)}"
    text = f"{trainer.world_size} = {nodes} x {trainer.num_devices}, started by {launcher}"
    yield Finding("ok", "ranks", text)


def memory_limit(device: torch.device) -> int:
    """Return the memory in bytes: of a GPU, otherwise main memory for all processes, limited by a cgroup."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = psutil.virtual_memory().total
    file = Path("/sys/fs/cgroup/memory.max")
    if not file.is_file():
        return total
    limit = file.read_text().strip()
    if limit == "max":
        return total
    return min(total, int(limit))


def list_images(run: Plan) -> Iterator[Finding]:
    """Report the number of images, which must be loaded."""
    data = run.data
    shape = f"{data.channels}x{data.image_size}x{data.image_size}"
    text = f"{data.name}: {len(data.train)} images {shape}, {len(data.class_names)} classes"
    if data.test is not None:
        text += f", {len(data.test)} for testing"
    yield Finding("ok", "data", text)


def find_missing_weights(callback: Callback, data: ImageData) -> list[str]:
    """Return the names of the networks that a callback needs and that are not on this machine."""
    missing: list[str] = []
    if not isinstance(callback, GenerationMetrics) or callback.find_obstacle(data) is not None:
        return missing
    name = callback.extractor.missing()
    if name is not None:
        missing.append(name)
    if data.latents:
        vae = data.latents.vae
        if vae and not Path(vae).is_dir() and not isinstance(try_to_load_from_cache(vae, "config.json"), str):
            missing.append(f"the autoencoder {vae}")
    return missing


def check_weights(run: Plan) -> Iterator[Finding]:
    """Report the networks of other projects that the callbacks need and that are not on this machine."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    missing = {}
    for callback in run.periodic:
        for name in find_missing_weights(callback, run.data):
            missing[name] = callback
    for name, callback in missing.items():
        from_hub = "Inception" not in name  # all other networks come from the Hugging Face hub
        level: Level = "error" if offline and from_hub else "warning"
        text = f"{type(callback).__name__} needs {name}, which is not on this machine"
        flag = "fetch it on a machine with a network, see docs/evaluation.md, or remove the callback"
        yield Finding(level, "weights", text, flag)
    if not missing:
        yield Finding("ok", "weights", "all networks that the callbacks need are on this machine")
