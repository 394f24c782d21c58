"""What this process runs on: versions, devices, the length of the run, and the images as they are."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from uvit_decay.class_names import class_list
from uvit_decay.data.decoding import open_image
from uvit_decay.data.folder import Images, OnDisk
from uvit_decay.data.image_files import list_images
from uvit_decay.doctor.plan import Run, gib
from uvit_decay.doctor.report import Finding
from uvit_decay.runtime.launchers import requested

COMPROMISED = ("2.6.2", "2.6.3")  # uploads of lightning that ran a stranger's code
PACKAGES = ("torch", "lightning", "numpy", "diffusers")
DRIVER = Path("/proc/driver/nvidia/version")
LOOKED_AT = 16  # images whose size is read


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
            yield Finding(
                "note", "devices", f"{there - count} GPUs of this node stay idle", f"--trainer.devices {there}"
            )
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
    """Say how many images there are, and whether pictures are enlarged. The data must be loaded."""
    data = run.data
    test = f", {len(data.test)} for testing" if data.test is not None else ""
    shape = f"{data.channels}x{data.image_size}x{data.image_size}"
    yield Finding("ok", "data", f"{data.name}: {len(data.train)} images {shape}, {len(data.class_names)} classes{test}")
    smallest = _smallest_side(data) if isinstance(data, Images) else None
    if smallest is not None and smallest < data.image_size:
        text = f"pictures of {smallest} pixels are enlarged to {data.image_size}"
        flags = f"--data.image_size {smallest} --model.net.image_size {smallest}"
        yield Finding("warning", "data", text, flags)


def _smallest_side(data: Images) -> int:
    """Return the shortest side of a few pictures, spread over the set, in pixels."""
    known = data.train.listing if isinstance(data.train, OnDisk) else None
    listing = known or list_images(data.path, None if data.classes is None else class_list(data.classes))
    count, sides = len(listing.members), []
    with listing.opened() as fetch:
        for i in range(0, count, math.ceil(count / LOOKED_AT)):
            with open_image(fetch(i), listing.members[i]) as picture:
                sides.append(min(picture.size))
    return min(sides)
