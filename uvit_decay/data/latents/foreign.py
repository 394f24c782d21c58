"""Latents that other projects wrote, recognised by their files and read in the order of their own loaders.

fast-DiT      *_features/N.npy, float32 (1, c, h, w): a sample of the posterior times 0.18215; *_labels/N.npy, (1,)
REPA          vae-sd/00000/img-mean-std-N.npy, float32 (2c, h, w): mean and standard deviation; vae-sd/dataset.json
LightningDiT  latents_rankRR_shardSSS.safetensors: `latents`, `latents_flip` (n, c, h, w), samples of each image and of
              its mirror image, `labels` (n,); latents_stats.pt: mean and standard deviation of each channel

Sources: extract_features.py and train.py of chuanyangjin/fast-DiT; preprocessing/dataset_tools.py and dataset.py of
sihyun-yu/REPA; extract_features.py and datasets/img_latent_dataset.py of hustvl/LightningDiT.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from uvit_decay.data.archives import DAMAGED, ArchiveIndex, find, open_members
from uvit_decay.images.autoencoder import NO_VARIANCE
from uvit_decay.runtime.errors import UserError, explain
from uvit_decay.runtime.files import PAGE, check_content
from uvit_decay.runtime.progress import track
from uvit_decay.runtime.tensor_files import load_pickle, load_tensors
from uvit_decay.runtime.validation import as_type

STABLE_DIFFUSION = 0.18215  # scaling factor that fast-DiT and REPA write into their code
FEATURES, LABELS = "_features", "_labels"  # ends of the names of fast-DiT's folders
REPA_FOLDER, REPA_LABELS, REPA_FILE = "vae-sd", "dataset.json", "img-mean-std-"
SHARDS = "latents_rank*_shard*.safetensors"
STATS = "latents_stats.pt"


class ForeignLatents(Protocol):
    """Latents of another project.

    Attributes:
        writer: name of the project.
        vae: autoencoder of the project; not a hub id if diffusers cannot load it.
        names: names of the rows, in order.
        labels: int64 (n,); None without classes.
        mirrored: whether `read` returns mirror images, too.
        posterior: whether the moments have a log-variance.
        channels: latent channels c.
        side: latent cells along each side.
        image_size: pixels of the encoded images; None if the files do not tell.
    """

    writer: str
    vae: str
    names: Sequence[str]
    labels: Tensor | None
    mirrored: bool
    posterior: bool
    channels: int
    side: int
    image_size: int | None

    def normalisation(self, scale: float | None) -> dict[str, Any]:
        """Return the fields of `LatentSpace` with which the project normalises, or with the factor `scale` alone."""

    def read(self, rows: range) -> Tensor:
        """Return moments of the autoencoder's latents, float32 (n, 1 or 2 sides, c or 2c, h, w)."""


def find_writer(path: Path) -> str | None:
    """Return the name of the project whose latents are in a folder or zip, by the names of files; None for others."""
    reader = _find_reader(path)
    return None if reader is None else reader[0].writer


def open_foreign(path: Path) -> ForeignLatents:
    """Open the latents of another project; raise a UserError if there are none, or if they are incomplete."""
    reader = _find_reader(path)
    if reader is None:
        if not path.exists():
            raise UserError(f"{path}: no such folder")
        raise UserError(
            f"{path} has no latents of fast-DiT (*{FEATURES} and *{LABELS}), REPA ({REPA_FOLDER}/{REPA_LABELS}) or "
            f"LightningDiT ({SHARDS}); to encode images, run uvit-decay encode"
        )
    kind, home = reader
    return kind(home)


def _find_reader(path: Path) -> tuple[type[ForeignLatents], Path] | None:
    """Return the class that reads latents, and their folder or zip; None for other files."""
    if path.is_dir():
        if _feature_folders(path):
            return FastDiT, path
        if any(path.glob(SHARDS)):
            return LightningDiT, path
    for home in (path / REPA_FOLDER, path / f"{REPA_FOLDER}.zip", path):
        if _is_repa(home):
            return REPA, home
    return None


def _feature_folders(path: Path) -> list[Path]:
    """Return the folders of features of fast-DiT that have a folder of labels beside them."""
    folders = sorted(path.glob(f"*{FEATURES}"))
    return [folder for folder in folders if _labels_folder(folder).is_dir()]


def _labels_folder(features: Path) -> Path:
    return features.with_name(features.name.removesuffix(FEATURES) + LABELS)


def _is_repa(home: Path) -> bool:
    """Return whether a folder or zip has the labels and files that REPA's dataset_tools.py writes."""
    if home.is_dir():
        return (home / REPA_LABELS).is_file() and any(home.glob(f"*/{REPA_FILE}*.npy"))
    if not zipfile.is_zipfile(home):
        return False
    names = find(home, {".npy"}).names
    return any(PurePosixPath(name).name.startswith(REPA_FILE) for name in names)


class FastDiT:
    """Pairs of .npy files; both folders are sorted by name as text, as in fast-DiT's `CustomDataset`.

    The images were mirrored at random before they were encoded, so there are no mirror images of their own.
    """

    writer = "fast-DiT"
    vae = "stabilityai/sd-vae-ft-ema"
    mirrored = False
    posterior = False

    def __init__(self, folder: Path) -> None:
        folders = _feature_folders(folder)
        if len(folders) > 1:
            names = ", ".join(home.name for home in folders)
            raise UserError(f"{folder} holds {len(folders)} sets of features, {names}: move all but one away")
        self.features = folders[0]
        labels = _labels_folder(self.features)
        self.names = find(self.features, {".npy"}).names
        _check_pairs(labels, self.names, find(labels, {".npy"}).names)
        first = _read_first(self.features, self.names)
        self.shape = first.shape
        if first.ndim != 4 or len(first) != 1 or first.shape[2] != first.shape[3]:
            raise UserError(
                f"{self.features / self.names[0]} has the shape {first.shape}, not (1, channels, side, side)"
            )
        self.channels, self.side = first.shape[1:3]
        self.image_size = 8 * self.side
        classes = _read_arrays(labels, self.names, "labels")
        self.labels = _check_labels(labels, [array.reshape(-1).tolist() for array in classes])

    def normalisation(self, scale: float | None) -> dict[str, Any]:
        """Return the fields of `LatentSpace`; the stored samples are multiplied by this factor already."""
        if scale is not None:
            raise UserError(f"latents of fast-DiT are stored times {STABLE_DIFFUSION}: leave out --scale")
        return {"scale": STABLE_DIFFUSION, "shift": 0.0}

    def read(self, rows: range) -> Tensor:
        """Return samples z of the posterior, float32 (n, 1, c, h, w)."""
        arrays = _read_arrays(self.features, self.names[rows.start : rows.stop], shape=self.shape)
        return torch.from_numpy(np.stack(arrays)).float() / STABLE_DIFFUSION


class REPA:
    """Files of mean and standard deviation, sorted by name, as in REPA's `CustomDataset`; images are never mirrored."""

    writer = "REPA"
    vae = "stabilityai/sd-vae-ft-mse"
    mirrored = False
    posterior = True

    def __init__(self, home: Path) -> None:
        self.home = home
        self.names = find(home, {".npy"}).names
        first = _read_first(home, self.names)
        self.shape = first.shape
        if first.ndim != 3 or first.shape[0] % 2 or first.shape[1] != first.shape[2]:
            raise UserError(f"{home}: {self.names[0]} has the shape {first.shape}, not (2 channels, side, side)")
        self.channels = first.shape[0] // 2
        self.side = first.shape[1]
        self.image_size = 8 * self.side
        self.labels = self._read_labels()

    def _read_labels(self) -> Tensor | None:
        """Return the labels of the entry `labels` of dataset.json; None if it is null."""
        with open_members(self.home, ArchiveIndex((REPA_LABELS,))) as fetch:
            text = fetch(0).getvalue()
        what = f"cannot read {REPA_LABELS} of {self.home}"
        with explain(what, ValueError, RecursionError, TypeError, LookupError):
            entries = json.loads(text)["labels"]  # one for each of a million files, too many for `read_json`
            if entries is None:
                return None
            label_of = dict(entries)
        _check_pairs(self.home / REPA_LABELS, self.names, label_of)
        return _check_labels(self.home / REPA_LABELS, [[label_of[name]] for name in self.names])

    def normalisation(self, scale: float | None) -> dict[str, Any]:
        """Return the fields of `LatentSpace`: the factor in REPA's train.py, or `scale`."""
        return {"scale": scale or STABLE_DIFFUSION, "shift": 0.0}

    def read(self, rows: range) -> Tensor:
        """Return mean and log-variance, float32 (n, 1, 2c, h, w); files have the standard deviation."""
        arrays = _read_arrays(self.home, self.names[rows.start : rows.stop], shape=self.shape)
        mean, std = torch.from_numpy(np.stack(arrays)).float().chunk(2, dim=1)
        if (std < 0).any():
            raise UserError(f"{self.home}: a standard deviation is negative; files of another tool?")
        log_variance = (2 * std.log()).clamp(min=NO_VARIANCE)
        return torch.cat([mean, log_variance], dim=1)[:, None]


class LightningDiT:
    """Shards of samples of each image and its mirror image, in the order of LightningDiT's `ImgLatentDataset`."""

    writer = "LightningDiT"
    vae = "VA-VAE (LightningDiT)"  # no hub id: diffusers cannot load its checkpoint
    mirrored = True
    posterior = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = sorted(folder.glob("*.safetensors"))
        self.starts = [0]
        labels = []
        for file in self.files:
            tensors = self._open(file)
            labels += tensors["labels"].tolist()
            self.starts.append(len(labels))
        self.labels = _check_labels(folder, [[label] for label in labels])
        self.names = [f"{file.name}/{i}" for file, counts in self._counts() for i in counts]
        _, self.channels, self.side, _ = self._open(self.files[0])["latents"].shape
        size = re.search(r"_(\d+)$", folder.resolve().name)  # extract_features.py ends the name by the image size
        self.image_size = int(size[1]) if size else None

    def _counts(self) -> Iterator[tuple[Path, range]]:
        """Yield each shard and the range of its rows."""
        for file, start, end in zip(self.files, self.starts, self.starts[1:], strict=False):
            yield file, range(end - start)

    def _open(self, file: Path) -> dict[str, Tensor]:
        """Return the memory-mapped tensors of a shard, all of the same number of rows."""
        _, tensors = load_tensors(file, verify=False)
        shapes = {name: tuple(tensors[name].shape) for name in ("latents", "latents_flip", "labels") if name in tensors}
        latents = shapes.get("latents", ())
        fits = len(shapes) == 3 and len(latents) == 4 and latents[2] == latents[3]
        if not fits or latents != shapes["latents_flip"] or shapes["labels"] != latents[:1]:
            raise UserError(f"{file} is not a shard of LightningDiT: it has {shapes}")
        return tensors

    def normalisation(self, scale: float | None) -> dict[str, Any]:
        """Return the fields of `LatentSpace`: the statistics beside the shards, or the factor `scale` alone."""
        if scale is not None:
            return {"scale": scale, "shift": 0.0}
        path = self.folder / STATS
        if not path.is_file():
            raise UserError(
                f"{path} does not exist: copy it from where LightningDiT wrote it, or give the factor that normalises "
                "without it, its latent_multiplier, as --scale"
            )
        stats = as_type(dict[str, Tensor], load_pickle(path), str(path))
        if {"mean", "std"} - stats.keys() or any(stats[key].numel() != self.channels for key in ("mean", "std")):
            raise UserError(f"{path} must have mean and std of {self.channels} channels")
        mean, std = (tuple(stats[key].flatten().tolist()) for key in ("mean", "std"))
        return {"scale": 1.0, "shift": 0.0, "channel_mean": mean, "channel_std": std}

    def read(self, rows: range) -> Tensor:
        """Return samples of the posterior of images and mirror images, float32 (n, 2, c, h, w)."""
        parts = []
        for file, start, end in zip(self.files, self.starts, self.starts[1:], strict=False):
            here = slice(max(rows.start - start, 0), min(rows.stop, end) - start)
            if here.start < here.stop:
                tensors = self._open(file)
                parts.append(torch.stack([tensors["latents"][here], tensors["latents_flip"][here]], dim=1).float())
        return torch.cat(parts)


def _check_pairs(where: Path, names: Sequence[str], others: Collection[str]) -> None:
    """Raise a UserError unless the files with latents and the labels in `where` have the same names."""
    without = sorted(set(names) - set(others))
    if without:
        raise UserError(f"{where}: {len(without)} latents have no label, the first is {without[0]}; copy all files")
    lost = sorted(set(others) - set(names))
    if lost:
        raise UserError(f"{where}: {len(lost)} labels have no latents, the first is {lost[0]}; copy all files")


def _check_labels(where: Path, labels: Sequence[Sequence[object]]) -> Tensor:
    """Return labels of one whole number each as int64 (n,); raise a UserError for others."""
    wrong = [row for row in labels if len(row) != 1 or type(row[0]) is not int or row[0] < 0]
    if wrong:
        raise UserError(f"{where}: {len(wrong)} labels are not the number of a class, the first is {wrong[0]}")
    return torch.tensor([row[0] for row in labels], dtype=torch.int64)


def _read_first(home: Path, names: Sequence[str]) -> np.ndarray:
    """Return the first array of a folder; raise a UserError if it has none."""
    if not names:
        raise UserError(f"{home} holds no .npy files")
    return _read_arrays(home, names[:1])[0]


def _read_arrays(
    home: Path, names: Sequence[str], title: str = "latents", shape: tuple[int, ...] | None = None
) -> list[np.ndarray]:
    """Return the arrays of .npy files in a folder or zip; raise a UserError if one has another shape."""
    arrays = []
    with open_members(home, ArchiveIndex(tuple(names))) as fetch, track(f"reading {title}", len(names), "file") as work:
        for i, name in enumerate(names):
            where = f"{home}: {name}"
            file = fetch(i)
            check_content(where, file.getbuffer()[:PAGE].tobytes())
            with explain(f"{where} is not a .npy file", *DAMAGED):
                array = np.load(file, allow_pickle=False)
            if shape is not None and array.shape != shape:
                raise UserError(f"{where} has the shape {array.shape}, the first file has {shape}")
            arrays.append(array)
            work.update()
    return arrays
