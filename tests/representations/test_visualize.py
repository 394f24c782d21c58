"""Images of features: what is drawn is what the network sees, where it sees it, and masks fit their images."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import tiny_trainer
from evaluations import evaluate, refused
from PIL import Image
from refusals import find_line, raises_user_error
from runs import latent_task

from uvit_decay.commands.features import open_patch_features
from uvit_decay.data.latents import Latents
from uvit_decay.representations.networks import open_network
from uvit_decay.representations.options import Visualization
from uvit_decay.representations.visualize import on_grid
from uvit_decay.runtime.random import normal
from uvit_decay.sampling_options import LoadingOptions

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """Two classes of 16 grey images, dark left and light right, or the other way, and masks that say where."""
    folder = tmp_path_factory.mktemp("halves")
    for i in range(16):
        values = np.zeros((8, 8), dtype=np.uint8)
        values[:, 4:] = 255
        mask = (values > 0).astype(np.uint8) * 3
        for kind, content in (("images", values), ("masks", mask)):
            path = folder / kind / ("left", "right")[i % 2] / f"{i:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(content[:, :: -1 if i % 2 else 1].copy()).save(path)
    return folder


@pytest.fixture(scope="module")
def latent_checkpoint(encoded, tmp_path_factory):
    """Of a network of latents."""
    folder = tmp_path_factory.mktemp("latent")
    tiny_trainer(folder, max_steps=2).fit(latent_task(), Latents(str(encoded), batch_size=11, num_workers=0))
    return folder / "checkpoints" / "last.ckpt"


def features_of(path, name, batch_size=64, time=0.2):
    options = Visualization(ckpt=path, images=str(name), time=time, seed=3, batch_size=batch_size)
    return open_patch_features(open_network(path, options), options, CPU)


def drawn(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def test_states_are_the_trunks_without_the_extra_tokens_and_later_blocks_never_run(trained, monkeypatch):
    features = features_of(trained, "digits:test")
    half = replace(features, reader=replace(features.reader, precision="bf16"))
    assert (features.level, half.level) == ("t = 0.2", "t = 0.2, bf16")
    (states,) = features.states([5, 2], [1, 2])
    assert states.shape == (2, 2, 16, 16)
    x = features.images.read([5, 2]).float() / 127.5 - 1
    noise = normal("probe", 3, "pictures", rows=torch.tensor([5, 2]), shape=(1, 8, 8))
    t = torch.full((2,), 0.2)
    with torch.no_grad():
        expected = list(features.reader.net.forward_intermediates(features.reader.path.add_noise(x, noise, t), t))
    torch.testing.assert_close(states, torch.stack([expected[i][:, 2:] for i in (1, 2)]))
    monkeypatch.setattr(features.reader.net.out_blocks[0], "forward", None)
    parts = torch.cat(list(features_of(trained, "digits:test", batch_size=1).states([5, 2], [1, 2])), dim=1)
    torch.testing.assert_close(parts, states)
    assert torch.equal(next(features.states([5, 2], [1, 2])), states)


def test_patches_lie_where_they_were():
    image = torch.arange(64.0).reshape(1, 1, 8, 8)
    patches = torch.nn.functional.unfold(image, 2, stride=2).mT.mean(dim=2)
    assert torch.equal(on_grid(patches), torch.nn.functional.avg_pool2d(image, 2)[0])
    large = on_grid(patches, 8)
    assert large.shape == (1, 8, 8)
    assert torch.equal(large[0, ::2, ::2], on_grid(patches)[0])
    assert torch.equal(large[0, 1::2, 1::2], on_grid(patches)[0])


def test_the_script_draws_digits(trained, tmp_path, monkeypatch, capsys):
    options = ["--ckpt", trained, "--images", "digits:test", "--layer", "1,mid_block", "--views", "pca,spectral,tsne"]
    for out in ("a.png", "b.png"):
        evaluate(monkeypatch, tmp_path, "features", *options, "--fit", 20, "--points", 40, "--num", 3, "--out", out)
    output = capsys.readouterr().out
    find_line(output, "1 in_blocks.0")
    find_line(output, "2 mid_block")
    find_line(output, "320 patches", "20 images")
    assert "wrote a.png: 3 images of digits-test" in output
    assert "wrote a_tsne.png: 40 images of 10 classes, perplexity 13" in output
    for name in ("{}.png", "{}_tsne.png"):
        first, second = (drawn(tmp_path / name.format(out)) for out in "ab")
        assert (first == second).all()
        assert len(np.unique(first.reshape(-1, 3), axis=0)) > 30


def test_colours_of_the_first_layer_tell_dark_from_light(trained, halves, tmp_path, monkeypatch, capsys):
    """The embedded patches of two kinds are two clusters, and these are the masks."""
    options = ["--layer", 0, "--time", 0.001, "--num", 16, "--views", "pca,spectral", "--masks", halves / "masks"]
    evaluate(monkeypatch, tmp_path, "features", "--ckpt", trained, "--images", halves / "images", *options)
    actual = re.findall(r"mIoU (\S+) %, (\w+) matching, 2 clusters, 2 classes, 16 images", capsys.readouterr().out)
    assert [matching for _, matching in actual] == ["greedy", "hungarian"]
    assert all(float(score) == 100 for score, _ in actual)
    assert (tmp_path / "features.png").stat().st_size > 1000


def test_latents_are_encoded_as_the_training_latents_were(latent_checkpoint, image_dir, encoded, tmp_path, monkeypatch):
    features = features_of(latent_checkpoint, image_dir)
    assert features.images.shape == (3, 32, 32)
    stored = Latents(str(encoded), batch_size=11, num_workers=0)
    stored.setup()
    expected = stored.network_input(stored.train[[0, 3]][0])
    torch.testing.assert_close(features.reader.to_input(features.images.read([0, 3])), expected, atol=2e-2, rtol=1e-2)
    options = ["--num", 3, "--fit", 10, "--clusters", 2, "--views", "pca,spectral"]
    evaluate(monkeypatch, tmp_path, "features", "--ckpt", latent_checkpoint, "--images", image_dir, *options)
    assert (tmp_path / "features.png").stat().st_size > 1000


def write_mask(folder, values):
    (folder / "left").mkdir(parents=True)
    Image.fromarray(values).save(folder / "left" / "00.png")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: None, "folder"),
        (lambda f: f.mkdir(), "masks/left/00.png"),
        (lambda f: write_mask(f, np.zeros((8, 8, 3), np.uint8)), "RGB"),
        (lambda f: write_mask(f, np.zeros((8, 9), np.uint8)), ("(9, 8)", "(8, 8)")),
        (lambda f: write_mask(f, np.full((8, 8), 255, np.uint8)), 255),
        (
            lambda f: write_mask(f, np.zeros((8, 8), np.uint8)) or (f / "left" / "00.png").write_bytes(b"no"),
            "masks/left/00.png",
        ),
    ],
)
def test_masks_that_do_not_fit_are_one_line(trained, halves, tmp_path, monkeypatch, capsys, make, message):
    make(tmp_path / "masks")
    options = ["--ckpt", trained, "--images", halves / "images", "--masks", "masks"]
    find_line(refused(monkeypatch, tmp_path, capsys, "features", *options), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--views", "umap"], ("--views", "pca,spectral,tsne", "umap")),
        (["--views", "pca", "--masks", "x"], ("spectral", "--views")),
        (["--time", "1"], ("times", "(0, 1)")),
        (["--clusters", "1"], ("--clusters", 2, 255)),
        (["--clusters", "200"], ("200 spectral", "200 patches", 128)),
        (["--views", "tsne", "--points", "4"], ("t-SNE", "5 images", 4)),
        (["--masks", "x"], "--masks"),
        (["--vae", "x"], "pixels"),
        (["--out", "folder"], "folder"),
    ],
)
def test_wrong_options_are_one_line(trained, tmp_path, monkeypatch, capsys, options, message):
    (tmp_path / "folder").mkdir()
    base = ["--ckpt", trained, "--images", "digits:test"]
    find_line(refused(monkeypatch, tmp_path, capsys, "features", *base, *options), message)


def test_images_without_classes_have_no_map(trained, halves, tmp_path, monkeypatch, capsys):
    options = ["--ckpt", trained, "--images", halves / "images" / "left", "--views", "tsne"]
    find_line(refused(monkeypatch, tmp_path, capsys, "features", *options), "tsne", "--views")


def test_images_and_networks_that_do_not_fit_are_refused(trained):
    options, wide = Visualization(ckpt=trained, images="digits:test"), open_network(trained, LoadingOptions())
    wide.net.image_size = 16
    with raises_user_error("8x8x1", "16x16x1"):
        open_patch_features(wide, options, CPU)
