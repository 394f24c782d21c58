"""Latents of other projects: converted, they give what the projects' own loaders yield."""

import io
import shutil

import numpy as np
import pytest
import torch
from conftest import tiny_trainer
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

from uvit_decay.commands.encode import COMMANDS
from uvit_decay.data import Latents
from uvit_decay.data.latents import manifest as manifests
from uvit_decay.nn import UViT
from uvit_decay.runtime.command_line import parse
from uvit_decay.tasks import DiffusionTask

EVERY = list(range(COUNT))
ZEROS = [0] * COUNT


def convert(source, target, *flags):
    parse(COMMANDS, ["import-latents", str(source), str(target), "--shard-size", "5", *flags])()
    return target


def read_set(folder, mirrored=False):
    """The moments and labels of all rows, and the manifest."""
    moments, labels = open_set(folder).mirrored(EVERY, torch.full((COUNT,), mirrored))
    return moments, labels, manifests.read(folder)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_fast_dits_samples_are_what_its_loader_yields(tmp_path, capsys):
    expected, labels = load_fast_dit(write_fast_dit(tmp_path / "features"))
    moments, found, manifest = read_set(convert(tmp_path / "features", tmp_path / "out"))
    torch.testing.assert_close(
        manifest.latents.sample(moments, torch.randn(COUNT, 4, 8, 8)), expected, rtol=1e-6, atol=0
    )
    assert found.tolist() == labels.tolist() != EVERY
    assert (manifest.latents.scale, manifest.latents.vae) == (0.18215, "stabilityai/sd-vae-ft-ema")
    assert (manifest.image_size, manifest.class_names, manifest.row) == (64, tuple("01234"), (1, 4, 8, 8))
    find_line(capsys.readouterr().out, "--data Latents", "--data.path", "--data.flip false")


@pytest.mark.parametrize("archive", [False, True])
def test_repas_means_and_deviations_are_what_its_loader_yields(tmp_path, archive):
    expected, labels = load_repa(write_repa(tmp_path / "plain"))
    source = write_repa(tmp_path / "zipped", archive=True) if archive else tmp_path / "plain"
    moments, found, manifest = read_set(convert(source, tmp_path / "out"))
    mean, std = expected.chunk(2, dim=1)
    assert torch.equal(moments[:, :4], mean)
    torch.testing.assert_close((0.5 * moments[:, 4:]).exp(), std, rtol=1e-5, atol=0)
    noise = torch.randn(COUNT, 4, 8, 8)
    torch.testing.assert_close(manifest.latents.sample(moments, noise), (mean + std * noise) * 0.18215)
    assert found.tolist() == labels.tolist()
    variance = (0.18215 * mean).var(dim=(0, 2, 3), correction=0) + (0.18215 * std).square().mean(dim=(0, 2, 3))
    assert manifest.statistics.std == pytest.approx(variance.sqrt().tolist(), rel=1e-5)


def test_repas_files_without_labels_have_no_classes(tmp_path):
    out = convert(write_repa(tmp_path / "repa", labelled=False) / "vae-sd", tmp_path / "out")
    assert read_set(out)[2].classes == {}
    with raises_user_error("--classes"):
        convert(tmp_path / "repa", tmp_path / "other", "--classes", "imagenet-1k")


def test_line_k_of_a_list_of_classes_names_label_k(tmp_path):
    write_fast_dit(tmp_path / "features")
    plain = read_set(convert(tmp_path / "features", tmp_path / "plain"))[2]
    names = ("zebra", "ant", "yak", "bee", "cow")
    (tmp_path / "classes.txt").write_text("\n".join(names))
    named = read_set(convert(tmp_path / "features", tmp_path / "named", "--classes", str(tmp_path / "classes.txt")))[2]
    assert named.class_names == names
    assert list(named.classes.values()) == list(plain.classes.values())
    data = Latents(str(tmp_path / "named"), classes=str(tmp_path / "classes.txt"), flip=False, batch_size=2)
    data.load()
    assert data.class_names == names


@pytest.mark.parametrize("content", [b"{}", b"[]", b"\xff", b'{"labels": [1]}', b'{"labels": 3}'])
def test_labels_of_repa_that_are_none_are_refused(tmp_path, content):
    home = write_repa(tmp_path / "repa")
    (file,) = home.rglob("dataset.json")
    file.write_bytes(content)
    with raises_user_error("dataset.json"):
        convert(home, tmp_path / "out")


def test_folders_without_files_are_refused(tmp_path):
    home = write_fast_dit(tmp_path / "features")
    for file in home.rglob("*.npy"):
        file.unlink()
    with raises_user_error(".npy"):
        convert(home, tmp_path / "out")


@pytest.mark.parametrize(("flags", "options"), [([], {}), (["--scale", "0.3"], dict(norm=False, multiplier=0.3))])
def test_lightning_dits_samples_and_mirror_images_are_what_its_loader_yields(tmp_path, flags, options):
    source = write_lightning_dit(tmp_path / "imagenet_train_64")
    out = convert(source, tmp_path / "out", *flags)
    for mirrored, key in ((False, "latents"), (True, "latents_flip")):
        expected, labels = load_lightning_dit(source, key, **options)
        moments, found, manifest = read_set(out, mirrored)
        torch.testing.assert_close(manifest.latents.sample(moments, torch.zeros(COUNT, 32, 4, 4)), expected)
        assert found.tolist() == labels.tolist()
    assert (manifest.image_size, manifest.latents.factor, manifest.row) == (64, 16, (2, 32, 4, 4))


def test_a_converted_set_trains_and_previews(tmp_path):
    out = convert(write_repa(tmp_path / "repa"), tmp_path / "out")
    with raises_user_error("--data.flip false"):
        Latents(out, num_workers=0).load()
    data = Latents(out, batch_size=4, num_workers=0, flip=False)
    trainer = tiny_trainer(tmp_path, max_steps=2)
    trainer.fit(DiffusionTask(UViT(8, 2, 4, dim=16, depth=2, heads=2, num_classes=5)), data)
    assert trainer.global_step == 2
    x = data.latents.mean(open_set(out)[EVERY][0])
    colours = data.preview(x)
    assert (colours.shape, colours.dtype) == ((COUNT, 3, 8, 8), torch.uint8)
    spread = colours.float().std(dim=(0, 2, 3))
    assert spread.min() > 30
    assert (colours.float().mean(dim=(0, 2, 3)) - 127.5).abs().max() < 5


def test_a_second_command_continues_and_changes_nothing(tmp_path, capsys):
    source = write_fast_dit(tmp_path / "features")
    out = convert(source, tmp_path / "out")
    before = contents(out)
    shards = sorted(out.glob("shard-*"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    convert(source, out)
    assert contents(out) == before
    find_line(capsys.readouterr().err, shards[1].name, "again")
    with raises_user_error("dtype float32", "float16"):
        convert(source, out, "--dtype", "float16")
    rewrite(source / "imagenet256_features" / "0.npy", np.zeros((1, 4, 8, 8), np.float32))
    with raises_user_error(shards[0].name, source):
        convert(source, out)
    assert contents(out) == before


def test_half_precision_halves_the_files(tmp_path):
    source = write_fast_dit(tmp_path / "features")
    full = read_set(convert(source, tmp_path / "a"))[0]
    half = read_set(convert(source, tmp_path / "b", "--dtype", "float16"))[0]
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), full, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("write", "writer"), [(write_fast_dit, "fast-DiT"), (write_repa, "REPA"), (write_lightning_dit, "LightningDiT")]
)
def test_training_on_their_folder_names_the_command(tmp_path, write, writer):
    folder = write(tmp_path / "their latents")
    with raises_user_error(writer, f"uvit-decay import-latents '{folder}'"):
        Latents(folder).load()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.txt").touch()
    with raises_user_error("uvit-decay encode", "new folder"):
        Latents(tmp_path / "other").load()


def rewrite(path, array):
    """Another array in place of a file."""
    file = io.BytesIO()
    np.save(file, array)
    path.write_bytes(file.getvalue())


FAST_DIT = [
    (lambda f: (f / "imagenet256_labels" / "3.npy").unlink(), (1, "label", "3.npy")),
    (lambda f: (f / "imagenet256_features" / "11.npy").unlink(), (1, "latents", "11.npy")),
    (lambda f: rewrite(f / "imagenet256_labels" / "2.npy", np.array([0.5])), (1, 0.5)),
    (lambda f: rewrite(f / "imagenet256_features" / "0.npy", np.zeros((2, 4, 8, 8))), ("0.npy", "(2, 4, 8, 8)")),
    (lambda f: rewrite(f / "imagenet256_features" / "7.npy", np.zeros((1, 4, 4, 4))), ("7.npy", "(1, 4, 4, 4)")),
    (lambda f: rewrite(f / "imagenet256_features" / "7.npy", np.full((1, 4, 8, 8), np.nan)), "finite"),
    (
        lambda f: (f / "imagenet256_features" / "7.npy").write_bytes(b"version https://git-lfs.github.com/spec/v1"),
        "LFS",
    ),
    (lambda f: (f / "imagenet256_features" / "7.npy").write_bytes(b"x"), "7.npy"),
]


@pytest.mark.parametrize(("damage", "message"), FAST_DIT)
def test_damaged_files_of_fast_dit_are_refused(tmp_path, damage, message):
    folder = write_fast_dit(tmp_path / "features")
    damage(folder)
    with raises_user_error(message):
        convert(folder, tmp_path / "out")


def test_two_sets_and_a_target_among_the_files_are_refused(tmp_path):
    folder = write_fast_dit(tmp_path / "features")
    with raises_user_error(folder / "out"):
        convert(folder, folder / "out")
    for name in ("features", "labels"):
        shutil.copytree(folder / f"imagenet256_{name}", folder / f"imagenet512_{name}")
    with raises_user_error(2, "imagenet256_features", "imagenet512_features"):
        convert(folder, tmp_path / "out")


def test_damaged_files_of_the_others_are_refused(tmp_path):
    repa = write_repa(tmp_path / "repa")
    (repa / "vae-sd" / "00000" / "img-mean-std-00000003.npy").unlink()
    with raises_user_error(1, "img-mean-std-00000003.npy"):
        convert(repa, tmp_path / "out")
    shards = write_lightning_dit(tmp_path / "shards")
    with raises_user_error("--image-size"):
        convert(shards, tmp_path / "out")
    with raises_user_error("--image-size 63"):
        convert(shards, tmp_path / "out", "--image-size", "63")
    (shards / "latents_stats.pt").unlink()
    with raises_user_error("latents_stats.pt", "--scale"):
        convert(shards, tmp_path / "out", "--image-size", "64")
    with raises_user_error("fast-DiT", "REPA", "LightningDiT"):
        convert(tmp_path, tmp_path / "out")


def test_an_autoencoder_that_is_not_there_is_refused(tmp_path):
    write_fast_dit(tmp_path / "features")
    with raises_user_error("./missing", "--vae"):
        convert(tmp_path / "features", tmp_path / "out", "--vae", "./missing")
    assert not (tmp_path / "out").exists()
