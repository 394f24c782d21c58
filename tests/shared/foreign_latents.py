"""Small latents as fast-DiT, REPA and LightningDiT write them, and what their own loaders yield.

Written down from extract_features.py and train.py of chuanyangjin/fast-DiT, preprocessing/dataset_tools.py and
dataset.py of sihyun-yu/REPA, and extract_features.py and datasets/img_latent_dataset.py of hustvl/LightningDiT.
"""

import io
import json
import os
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

COUNT = 12  # names of one and two digits, whose order as text is another one


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def write_fast_dit(folder: Path) -> Path:
    """The end of the loop of extract_features.py: `train_steps` numbers the files."""
    for name in ("imagenet256_features", "imagenet256_labels"):
        os.makedirs(folder / name)
    for step in range(COUNT):
        x = draw(1, 4, 8, 8, seed=step).mul_(0.18215).numpy()
        np.save(f"{folder}/imagenet256_features/{step}.npy", x)
        np.save(f"{folder}/imagenet256_labels/{step}.npy", torch.tensor([step % 5]).numpy())
    return folder


def load_fast_dit(folder: Path):
    """The features and labels of `CustomDataset`, in its order, without the dimension that train.py squeezes."""
    features, labels = folder / "imagenet256_features", folder / "imagenet256_labels"
    x = [np.load(features / name) for name in sorted(os.listdir(features))]
    y = [np.load(labels / name) for name in sorted(os.listdir(labels))]
    return torch.from_numpy(np.stack(x)).squeeze(1), torch.from_numpy(np.stack(y)).squeeze(1)


def write_repa(folder: Path) -> Path:
    """`encode` of dataset_tools.py, whose labels are the numbers of classes."""
    contents, labels = {}, []
    for step in range(COUNT):
        mean_std = torch.cat([draw(4, 8, 8, seed=step), draw(4, 8, 8, seed=step + 100).abs() * 0.1 + 1e-3])
        name = f"{step:08d}"[:5] + f"/img-mean-std-{step:08d}.npy"
        file = io.BytesIO()
        np.save(file, mean_std)
        contents[name] = file.getvalue()
        labels.append([name, step % 5])
    contents["dataset.json"] = json.dumps({"labels": labels}).encode()
    for name, content in contents.items():
        (folder / "vae-sd" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "vae-sd" / name).write_bytes(content)
    return folder


def load_repa(folder: Path):
    """The features and labels of `CustomDataset`, in its order."""
    home = folder / "vae-sd"
    names = sorted(os.path.relpath(path, home) for path in home.rglob("*.npy"))
    labels = dict(json.loads((home / "dataset.json").read_text())["labels"])
    features = np.stack([np.load(home / name) for name in names])
    return torch.from_numpy(features), torch.tensor([labels[name] for name in names])


def write_lightning_dit(folder: Path) -> Path:
    """extract_features.py: shards of two ranks, and `compute_latent_stats` of the loader."""
    folder.mkdir(parents=True)
    every = []
    for rank, shard, count in ((0, 0, 5), (0, 1, 3), (1, 0, 4)):
        latents = 2 + 3 * draw(count, 32, 4, 4, seed=10 * rank + shard)
        labels = torch.arange(count) + rank
        tensors = {"latents": latents, "latents_flip": latents.flip(-1) + 0.1, "labels": labels}
        metadata = {"total_size": f"{count}", "dtype": f"{latents.dtype}", "device": f"{latents.device}"}
        save_file(tensors, folder / f"latents_rank{rank:02d}_shard{shard:03d}.safetensors", metadata=metadata)
        every.append(latents)
    mean = torch.cat(every).mean(dim=[0, 2, 3], keepdim=True)
    std = torch.cat(every).std(dim=[0, 2, 3], keepdim=True)
    torch.save({"mean": mean, "std": std}, folder / "latents_stats.pt")
    return folder


def load_lightning_dit(folder: Path, key: str = "latents", norm: bool = True, multiplier: float = 1.0):
    """Features and labels of `ImgLatentDataset`, of the images or of their mirror images (`latents_flip`)."""
    stats = torch.load(folder / "latents_stats.pt", weights_only=True)
    features, labels = [], []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as file:
            feature = file.get_slice(key)[:]
            if norm:
                feature = (feature - stats["mean"]) / stats["std"]
            features.append(feature * multiplier)
            labels.append(file.get_slice("labels")[:])
    return torch.cat(features), torch.cat(labels)
