"""What this process runs on, and what it has: versions, devices, images, networks of other people."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from lightning.pytorch import Callback

from uvit_decay.callbacks.generation import GenerationMetrics
from uvit_decay.data import ImageData
from uvit_decay.doctor.report import Finding, Run, gib
from uvit_decay.runtime.distributed import requested

COMPROMISED = ("2.6.2", "2.6.3")  # uploads of lightning that ran a stranger's code
PACKAGES = ("torch", "lightning", "numpy", "diffusers")
DRIVER = Path("/proc/driver/nvidia/version")


def installed(run: Run) -> Iterator[Finding]:
    """Name the versions; compromised uploads are errors."""
    shown = ", ".join([f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)])
    bad = [f"{name} {found}" for name in ("lightning", "pytorch-lightning") if (found := _version(name)) in COMPROMISED]
    if bad:
        yield Finding("error", "versions", f"{', '.join(bad)} was a compromised upload", "pip install -U lightning")
    yield Finding("ok", "versions", shown)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def devices(run: Run) -> Iterator[Finding]:
    """Name the devices of this node, their memory and the precision of training."""
    device, count = run.trainer.strategy.root_device, run.trainer.num_devices
    precision = f"trains in {run.trainer.precision}"
    if device.type == "cuda":
        there, kind = torch.cuda.device_count(), torch.cuda.get_device_properties(device)
        bf16 = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16"
        text = f"{count} of {there} GPUs, {kind.name}, {gib(kind.total_memory)}, {kind.major}.{kind.minor}, {bf16}"
        yield Finding("ok", "devices", f"{text}, {precision}")
        if count < there:
            text = f"{there - count} GPUs of this node stay idle"
            yield Finding("note", "devices", text, f"--trainer.devices {there}")
        return
    cores = os.cpu_count() or 1
    text = f"{count} process{'es' * (count > 1)} on {cores} CPU cores, {gib(memory_limit(device))}"
    yield Finding("ok", "devices", f"{text}, {precision}")
    if count > cores:
        text = f"--trainer.devices {count} starts {count} processes on {cores} cores"
        yield Finding("error", "devices", text, f"--trainer.devices {min(cores, 8)}, or fewer")
    if torch.accelerator.is_available():
        name = torch.accelerator.current_accelerator()
        yield Finding("note", "devices", f"trains on the CPU, although {name} is here", "--trainer.accelerator auto")
    elif DRIVER.exists():
        text = "this machine has an NVIDIA driver, but torch finds no GPU"
        yield Finding("warning", "devices", text, "install torch for CUDA, or look at CUDA_VISIBLE_DEVICES")


def ranks(run: Run) -> Iterator[Finding]:
    """Say who starts the processes; `check_nodes` has compared their number with the flags."""
    (started, launcher), trainer = requested(), run.trainer
    count = f"{trainer.world_size} = {trainer.num_nodes} node{'s' * (trainer.num_nodes > 1)} x {trainer.num_devices}"
    yield Finding("ok", "ranks", f"{count}, started by {launcher if started > 1 else 'Lightning'}")


def memory_limit(device: torch.device) -> int:
    """Return the bytes of a GPU, or of main memory that this process and its siblings may take (cgroups count)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = Path("/sys/fs/cgroup", name)
        word = limit.read_text().strip() if limit.is_file() else ""
        total = min(total, int(word)) if word.isdecimal() else total
    return total


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
        text = f"{type(callback).__name__} needs {name}, not on this machine"
        text += ", and HF_HUB_OFFLINE is set" if hub else ": it is downloaded when the run starts"
        flag = "fetch it where there is a network, as docs/evaluation.md says, or remove the callback"
        yield Finding("error" if hub else "warning", "weights", text, flag)
    if not missing and any(isinstance(callback, GenerationMetrics) for callback in run.periodic):
        yield Finding("ok", "weights", "all networks that the callbacks need are on this machine")
