"""examples/import_latents.py: latents of other projects, converted, give what the projects' own loaders yield.

Writers and loaders are written down from extract_features.py and train.py of chuanyangjin/fast-DiT,
preprocessing/dataset_tools.py and dataset.py of sihyun-yu/REPA, and extract_features.py and
datasets/img_latent_dataset.py of hustvl/LightningDiT.
"""

import json
import os
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, tiny_trainer
from latent_files import open_set
from refusals import find_line
from safetensors import safe_open
from safetensors.torch import save_file

from uvit_decay.data import Latents
from uvit_decay.nn import UViT
from uvit_decay.tasks import DiffusionTask

COUNT = 12  # names of one and two digits, whose order as text is another one
EVERY = list(range(COUNT))
PROGRAM = runpy.run_path(str(ROOT / "examples" / "import_latents.py"))
CLOSE = {"rtol": 1e-3, "atol": 1e-3}  # of float16


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
    labels = []
    for step in range(COUNT):
        mean_std = torch.cat([draw(4, 8, 8, seed=step), draw(4, 8, 8, seed=step + 100).abs() * 0.1 + 1e-3])
        name = f"{step:08d}"[:5] + f"/img-mean-std-{step:08d}.npy"
        (folder / "vae-sd" / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / "vae-sd" / name, mean_std)
        labels.append([name, step % 5])
    (folder / "vae-sd" / "dataset.json").write_text(json.dumps({"labels": labels}))
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
        save_file(tensors, folder / f"latents_rank{rank:02d}_shard{shard:03d}.safetensors")
        every.append(latents)
    mean = torch.cat(every).mean(dim=[0, 2, 3], keepdim=True)
    std = torch.cat(every).std(dim=[0, 2, 3], keepdim=True)
    torch.save({"mean": mean, "std": std}, folder / "latents_stats.pt")
    return folder


def load_lightning_dit(folder: Path, key: str):
    """Features and labels of `ImgLatentDataset`, of the images or of their mirror images (`latents_flip`)."""
    stats = torch.load(folder / "latents_stats.pt", weights_only=True)
    features, labels = [], []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as file:
            features.append((file.get_slice(key)[:] - stats["mean"]) / stats["std"])
            labels.append(file.get_slice("labels")[:])
    return torch.cat(features), torch.cat(labels)


def convert(source, target, image_size=64, classes=None):
    """Convert latents in shards of 5 images; return their manifest and their moments without and with the mirror."""
    PROGRAM["describe"].__globals__["SHARD"] = 5
    manifest = PROGRAM["convert"](source, target, image_size, classes)
    stored = open_set(target)
    sides = [stored.mirrored(EVERY, torch.full((COUNT,), mirrored))[0] for mirrored in (False, True)]
    return manifest, *sides, stored.labels.tolist()


def test_fast_dits_samples_are_what_its_loader_yields(tmp_path, capsys):
    expected, labels = load_fast_dit(write_fast_dit(tmp_path / "features"))
    manifest, images, mirrored, found = convert(tmp_path / "features", tmp_path / "out")
    torch.testing.assert_close(manifest.latents.sample(images, torch.randn(COUNT, 4, 8, 8)), expected, **CLOSE)
    assert torch.equal(images, mirrored)
    assert found == labels.tolist() != EVERY
    assert (manifest.class_names, manifest.row, len(manifest.shards)) == (tuple("01234"), (2, 8, 8, 8), 3)
    find_line(capsys.readouterr().out, "fast-DiT", f"{COUNT} images", f"{2 * COUNT} rows", "without mirror")


def test_repas_means_and_deviations_are_what_its_loader_yields(tmp_path):
    expected, labels = load_repa(write_repa(tmp_path / "repa"))
    manifest, images, mirrored, found = convert(tmp_path / "repa", tmp_path / "out")
    mean, std = expected.chunk(2, dim=1)
    noise = torch.randn(COUNT, 4, 8, 8)
    torch.testing.assert_close(manifest.latents.sample(images, noise), (mean + std * noise) * 0.18215, **CLOSE)
    assert torch.equal(images, mirrored)
    assert found == labels.tolist()
    variance = (0.18215 * mean).var(dim=(0, 2, 3), correction=0) + (0.18215 * std).square().mean(dim=(0, 2, 3))
    assert manifest.statistics.std == pytest.approx(variance.sqrt().tolist(), rel=1e-3)


def test_lightning_dits_mirror_images_are_stored_with_their_images(tmp_path, capsys):
    source = write_lightning_dit(tmp_path / "shards")
    manifest, *sides, found = convert(source, tmp_path / "out")
    for moments, key in zip(sides, ("latents", "latents_flip"), strict=True):
        expected, labels = load_lightning_dit(source, key)
        torch.testing.assert_close(manifest.latents.sample(moments, torch.zeros(COUNT, 32, 4, 4)), expected, **CLOSE)
        assert found == labels.tolist()
    assert (manifest.latents.factor, manifest.row) == (16, (2, 64, 4, 4))
    find_line(capsys.readouterr().out, f"{COUNT} images", f"{2 * COUNT} rows", "with its mirror")


def test_a_converted_set_with_named_classes_trains_and_previews(tmp_path):
    names = ("zebra", "ant", "yak", "bee", "cow", "unused")
    (tmp_path / "classes.txt").write_text("\n".join(names))
    out = tmp_path / "out"
    _, images, _, _ = convert(write_repa(tmp_path / "repa"), out, classes=str(tmp_path / "classes.txt"))
    data = Latents(out, batch_size=4, num_workers=0, classes=tmp_path / "classes.txt")
    trainer = tiny_trainer(tmp_path, max_steps=2)
    trainer.fit(DiffusionTask(UViT(8, 2, 4, dim=16, depth=2, heads=2, num_classes=6)), data)
    assert (trainer.global_step, data.class_names) == (2, names)
    colours = data.preview(data.latents.mean(images))
    assert (colours.shape, colours.dtype) == ((COUNT, 3, 8, 8), torch.uint8)
    assert colours.float().std(dim=(0, 2, 3)).min() > 30
    assert (colours.float().mean(dim=(0, 2, 3)) - 127.5).abs().max() < 5
