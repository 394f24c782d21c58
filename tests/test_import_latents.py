"""examples/import_latents.py: latents of other projects, converted, give what the projects' own loaders yield."""

import runpy

import numpy as np
import pytest
import torch
from conftest import ROOT, tiny_trainer
from foreign_latents import (
    COUNT,
    load_fast_dit,
    load_lightning_dit,
    load_repa,
    write_fast_dit,
    write_lightning_dit,
    write_repa,
)
from latent_files import open_set
from refusals import find_line, raises_user_error

from uvit_decay.data import Latents
from uvit_decay.nn import UViT
from uvit_decay.tasks import DiffusionTask

EVERY = list(range(COUNT))
PROGRAM = runpy.run_path(str(ROOT / "examples" / "import_latents.py"))
CLOSE = {"rtol": 1e-3, "atol": 1e-3}  # of float16


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


def test_what_cannot_be_converted_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"fast-DiT.*REPA.*LightningDiT"):
        convert(tmp_path, tmp_path / "out")
    source = write_fast_dit(tmp_path / "features")
    np.save(source / "imagenet256_features" / "7.npy", np.full((1, 4, 8, 8), np.nan, np.float32))
    with pytest.raises(SystemExit, match="finite"):
        convert(source, tmp_path / "out")
    with raises_user_error("manifest.json"):
        Latents(tmp_path / "out").load()
