"""Kinds of files with tensors: checkpoints, latents, features, samples, weights of other programs."""

from __future__ import annotations

import io
import shutil
import struct
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import mae_reference
import numpy as np
import torch
from cases import Kind, Sources
from conftest import tiny_task
from official_files import TINY, TINY_MAE, tiny, tiny_sit

from uvit_decay.checkpoint import load, read_training_checkpoint
from uvit_decay.checkpoint.convert import export_file, import_official
from uvit_decay.data import Latents
from uvit_decay.evaluation.feature_store import FeatureStore
from uvit_decay.evaluation.open_by_name import open_images
from uvit_decay.runs.compatibility import check
from uvit_decay.terminal.errors import UserError

RANDOM = np.random.default_rng(0)
PARTS = [range(0, 4), range(4, 8), range(8, 10)]
CANARY = "canary"  # what hostile contents would leave in the working folder
COMMANDS = (("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "exec"), ("subprocess", "Popen"))
COMMANDS += (("subprocess", "check_output"), ("builtins", "open"), ("pathlib", "Path.touch"), ("shutil", "rmtree"))


def evil_pickle(data: bytes, random: Random) -> bytes:
    """Return a pickle that runs a program, by the opcodes of the first or of later protocols."""
    module, name = random.choice(COMMANDS)
    argument = f"open('{CANARY}', 'w')" if name in ("eval", "exec") else f"touch {CANARY}"
    named = f"c{module}\n{name}\n".encode()
    text = b"X" + struct.pack("<I", len(argument)) + argument.encode()
    short = b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93"
    call = random.choice((named + b"(" + text + b"tR", b"\x80\x04" + short + text + b"\x85R"))
    body = data[2:] if data[:1] == b"\x80" else data
    return random.choice((call + b".", call + b"0" + body, data[:2] + call + b"0" + body))


def zip_pickle(data: bytes, random: Random) -> bytes:
    """Let the pickle of a file of torch.save, or an array, run a program; all checksums are right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    target = next((name for name, _ in members if name.endswith("data.pkl")), members[0][0])
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members:
            archive.writestr(name, evil_pickle(content, random) if name == target else content)
    return file.getvalue()


def make_training(folder: Path, sources: Sources) -> None:
    shutil.copy(sources.trained, folder / "last.ckpt")


def read_network(folder: Path, file: Path) -> Any:
    loaded = load(folder / file.name)
    return [loaded.net, loaded.net.config, {name: value for name, value in vars(loaded).items() if name != "net"}]


def read_resumed(folder: Path, file: Path) -> Any:
    contents = read_training_checkpoint(file)
    check(contents, tiny_task(), str(file))
    return contents


def make_exported(folder: Path, sources: Sources) -> None:
    export_file(sources.trained, folder / "model.safetensors")


OFFICIAL = {
    "uvit": (tiny, TINY),
    "sit": (tiny_sit, TINY),
    "mae": (lambda: mae_reference.full_file(**mae_reference.SMALL), TINY_MAE),
}


def make_official(folder: Path, sources: Sources) -> None:
    for name, (contents, _) in OFFICIAL.items():
        torch.save(contents(), folder / f"{name}.pth")


def read_imported(folder: Path, file: Path) -> Any:
    target = folder / "out" / "imported.safetensors"
    import_official(file, target, None, OFFICIAL[file.stem][1])
    return read_network(target.parent, target)


def make_latents(folder: Path, sources: Sources) -> None:
    shutil.copytree(sources.encoded, folder / "latents")


def read_latents(folder: Path, file: Path) -> Any:
    data = Latents(str(folder / "latents"), batch_size=1)
    data.setup()
    every = list(range(len(data.train)))
    mirrored, labels = data.train.mirrored(every, torch.ones(len(every), dtype=torch.bool))
    return [data.train[every], mirrored, labels, data.class_names, data.latents, data.image_size]


def store_of(folder: Path) -> FeatureStore:
    return FeatureStore(folder / "features", {"images": "some", "extractor": "one"}, PARTS)


def make_store(folder: Path, sources: Sources) -> None:
    store = store_of(folder)
    store.open()
    for part in PARTS:
        features = torch.from_numpy(RANDOM.normal(size=(len(part), 5))).float()
        images = torch.from_numpy(RANDOM.integers(256, size=(len(part), 3, 4, 4), dtype=np.uint8))
        store.add(part, {"features": features, "images": images, "calls": torch.tensor([part.start])})


def read_store(folder: Path, file: Path) -> Any:
    store = store_of(folder)
    if lost := store.open():
        raise UserError(f"{folder}/{file.name}: {lost} are extracted again")
    return [store.tensor("features"), store.tensor("images"), store.statistics(), store.nfe]


def make_samples(folder: Path, sources: Sources) -> None:
    images = RANDOM.integers(256, size=(6, 8, 8, 3), dtype=np.uint8)
    np.savez(folder / "samples.npz", arr_0=images, arr_1=np.arange(6))
    np.savez_compressed(folder / "packed.npz", arr_0=images, arr_1=np.arange(6))


def read_samples(folder: Path, file: Path) -> Any:
    source = open_images(str(file), 3)
    return [source.read(range(len(source))), source.labels, source.class_names]


TENSOR_KINDS = {
    "checkpoint, to sample from": Kind(make_training, read_network, "*.ckpt", (zip_pickle,)),
    "checkpoint, to resume from": Kind(make_training, read_resumed, "*.ckpt", (zip_pickle,)),
    "exported .safetensors": Kind(make_exported, read_network, "*.safetensors", ()),
    "official .pth to import": Kind(make_official, read_imported, "*.pth", (zip_pickle,)),
    "latents": Kind(make_latents, read_latents, "latents/*.safetensors", ()),
    "stored features": Kind(make_store, read_store, "features/*.safetensors", ()),
    "samples .npz": Kind(make_samples, read_samples, "*.npz", (zip_pickle,)),
}
