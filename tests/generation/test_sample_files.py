"""Folders of images: completed after a kill, never mixed, one program at a time."""

import json
import shutil

import numpy as np
import pytest
from conftest import pixels, sample, save_tiny_vae
from hub_folders import write_latent_sit
from PIL import Image
from refusals import find_line, raises_user_error, refused

from uvit_decay.files.writing import claim_paths
from uvit_decay.generation.files import find_missing
from uvit_decay.generation.options import SamplingOptions
from uvit_decay.generation.samples import Samples


def array(folder):
    return np.stack([np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))])[..., None]


@pytest.fixture(scope="module")
def ten(trained, tmp_path_factory):
    """Return the folder in which --out p of ten images lies, and the options that made them."""
    folder, args = tmp_path_factory.mktemp("ten"), ["--ckpt", trained, "--steps", 2, "--out", "p"]
    with pytest.MonkeyPatch.context() as patch:
        sample(patch, folder, *args, "--num", 10)
    return folder, args


@pytest.fixture
def half(ten, tmp_path):
    """Options of a folder that lacks four of its ten images, and has the remains of one."""
    shutil.copytree(ten[0] / "p", tmp_path / "p")
    for i in (0, 3, 7, 9):
        (tmp_path / "p" / f"{i:06d}.png").unlink()
    (tmp_path / "p" / ".000003.png.01234567.partial").touch()
    return ten[1]


def test_only_what_is_missing_is_made(half, tmp_path, monkeypatch, capsys):
    for num, count in ((10, 4), (12, 2), (12, 0)):
        sample(monkeypatch, tmp_path, *half, "--num", num)
        assert f"wrote p: {count} images, {num - count} were there" in capsys.readouterr().out
    sample(monkeypatch, tmp_path, *half[:-1], "whole.npz", "--num", 12)
    assert np.array_equal(array(tmp_path / "p"), pixels(tmp_path / "whole.npz"))
    names = {f"{i:06d}.png" for i in range(12)}
    assert {path.name for path in (tmp_path / "p").iterdir()} == {*names, "sampling.json"}


def test_what_is_no_whole_picture_is_made_again(half, tmp_path, monkeypatch, capsys):
    sample(monkeypatch, tmp_path, *half, "--num", 10)
    whole, folder = array(tmp_path / "p"), tmp_path / "p"
    (folder / "000001.png").write_bytes(b"")
    (folder / "000002.png").write_bytes((folder / "000002.png").read_bytes()[:-5])
    for name, target in (("000004.png", "000005.png"), ("000006.png", "nowhere")):
        (folder / name).unlink()
        (folder / name).symlink_to(target)
    sample(monkeypatch, tmp_path, *half, "--num", 10)
    assert "wrote p: 4 images, 6 were there" in capsys.readouterr().out
    assert np.array_equal(array(folder), whole)
    assert not any(path.is_symlink() for path in folder.iterdir())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (["--seed", 1], ("seed 0", 1)),
        (["--classes", "1,2"], ("all 10", "1,2")),
        (["--weights", "raw"], ("weights ema", "raw")),
        (["--num", 8], ("--num 8", "000008.png")),
    ],
)
def test_images_of_another_sampling_are_left_alone(half, tmp_path, monkeypatch, capsys, change, reason):
    before = {path: path.read_bytes() for path in (tmp_path / "p").glob("[!.]*")}
    error = refused(capsys, sample, monkeypatch, tmp_path, *half, "--num", 10, *change)
    find_line(error, "--out p", reason)
    assert before == {path: path.read_bytes() for path in (tmp_path / "p").glob("[!.]*")}


def test_images_of_another_checkpoint_are_left_alone_wherever_it_lies(half, tmp_path, monkeypatch, capsys):
    moved = tmp_path / "moved.ckpt"
    moved.write_bytes(half[1].read_bytes())
    sample(monkeypatch, tmp_path, "--ckpt", moved, *half[2:], "--num", 10)
    about = tmp_path / "p" / "sampling.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "sha256": "0" * 64}))
    find_line(refused(capsys, sample, monkeypatch, tmp_path, *half, "--num", 10), "0" * 64)
    about.write_text("{")
    find_line(refused(capsys, sample, monkeypatch, tmp_path, *half, "--num", 10), "p/sampling.json")


def test_what_another_program_is_writing_is_left_alone(trained, tmp_path, monkeypatch, capsys):
    out = "p"
    (tmp_path / out).mkdir()
    with claim_paths(tmp_path / out):
        before = {*tmp_path.rglob("*")}
        error = refused(capsys, sample, monkeypatch, tmp_path, "--ckpt", trained, "--num", 2, "--out", out)
        find_line(error, "another program", out)
        assert {*tmp_path.rglob("*")} == before
    sample(monkeypatch, tmp_path, "--ckpt", trained, "--num", 2, "--out", out)
    assert {path.name for path in tmp_path.iterdir()} == {out}


def test_a_folder_is_not_completed_by_another_autoencoder_in_the_same_place(vae, tmp_path):
    folder = shutil.copytree(vae, tmp_path / "vae")
    file = write_latent_sit(tmp_path / "sit.safetensors", vae)
    options = SamplingOptions(vae=str(folder))
    (tmp_path / "p").mkdir()
    first = Samples.from_options(file, options)
    assert find_missing(tmp_path / "p", first, 2) == find_missing(tmp_path / "p", first, 2) == [0, 1]
    shutil.rmtree(folder)
    save_tiny_vae(folder, seed=1)
    with raises_user_error("vae_sha256", "`out`"):
        find_missing(tmp_path / "p", Samples.from_options(file, options), 2)
