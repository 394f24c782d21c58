"""What this process runs on, and what it has: versions, devices, images, networks of other people."""

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

from uvit_decay.callbacks.generation import GenerationMetrics
from uvit_decay.data import ImageData
from uvit_decay.doctor.report import Finding, Run, gib
from uvit_decay.runtime.distributed import requested

PACKAGES = ("torch", "lightning", "numpy", "diffusers")
DRIVER = Path("/proc/driver/nvidia/version")


def installed(run: Run) -> Iterator[Finding]:
    """Name the versions."""
    packages = (f"{name} {version(name)}" for name in PACKAGES)
    yield Finding("ok", "versions", ", ".join([f"python {platform.python_version()}", *packages]))


def devices(run: Run) -> Iterator[Finding]:
    """Name the devices of this node, their memory and the precision of training."""
    device, count = run.trainer.strategy.root_device, run.trainer.num_devices
    on_gpu, cores = device.type == "cuda", os.cpu_count() or 1
    if on_gpu:
        text = f"{count} of {torch.cuda.device_count()} GPUs, {torch.cuda.get_device_name(device)}"
    else:
        text = f"{count} process{'es' * (count > 1)} on {cores} CPU cores"
    yield Finding("ok", "devices", f"{text}, {gib(memory_limit(device))}, trains in {run.trainer.precision}")
    if not on_gpu and count > cores:
        text = f"--trainer.devices {count} starts {count} processes on {cores} cores"
        yield Finding("error", "devices", text, f"--trainer.devices {min(cores, 8)}, or fewer")
    if DRIVER.exists() and not torch.accelerator.is_available():
        text = "this machine has an NVIDIA driver, but torch finds no GPU"
        yield Finding("warning", "devices", text, "install torch for CUDA, or look at CUDA_VISIBLE_DEVICES")


def ranks(run: Run) -> Iterator[Finding]:
    """Say who starts the processes; `check_nodes` has compared their number with the flags."""
    (started, launcher), trainer = requested(), run.trainer
    count = f"{trainer.world_size} = {trainer.num_nodes} node{'s' * (trainer.num_nodes > 1)} x {trainer.num_devices}"
    yield Finding("ok", "ranks", f"{count}, started by {launcher if started > 1 else 'Lightning'}")


def memory_limit(device: torch.device) -> int:
    """Return the bytes of a GPU, or of main memory that this process and its siblings may take (a cgroup counts)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total, limit = psutil.virtual_memory().total, Path("/sys/fs/cgroup/memory.max")
    word = limit.read_text().strip() if limit.is_file() else "max"
    return total if word == "max" else min(total, int(word))


def images(run: Run) -> Iterator[Finding]:
    """Say how many images there are; they must be loaded."""
    data = run.data
    test = f", {len(data.test)} for testing" if data.test is not None else ""
    shape = f"{data.channels}x{data.image_size}x{data.image_size}"
    yield Finding("ok", "data", f"{data.name}: {len(data.train)} images {shape}, {len(data.class_names)} classes{test}")


def missing_weights(callback: Callback, data: ImageData) -> list[str]:
    """Return the networks that a callback needs and that are not on this machine."""
    if not isinstance(callback, GenerationMetrics):
        return []
    missing = [] if (name := callback.extractor.missing()) is None else [name]
    vae = data.latents.vae if data.latents else None
    if vae and not Path(vae).is_dir() and not isinstance(try_to_load_from_cache(vae, "config.json"), str):
        missing.append(f"the autoencoder {vae}")
    return missing


def weights(run: Run) -> Iterator[Finding]:
    """Name the networks of other people that the callbacks need, and that are not here."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    missing = {name: callback for callback in run.periodic for name in missing_weights(callback, run.data)}
    for name, callback in missing.items():
        hub = offline and "Inception" not in name  # all others come from the Hugging Face hub
        text = f"{type(callback).__name__} needs {name}, which is not on this machine"
        flag = "fetch it where there is a network, as docs/evaluation.md says, or remove the callback"
        yield Finding("error" if hub else "warning", "weights", text, flag)
    if not missing:
        yield Finding("ok", "weights", "all networks that the callbacks need are on this machine")
