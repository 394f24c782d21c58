"""The size that images are cropped to: a flag of the data, or else that of the network."""

import pytest
import yaml
from conftest import ROOT, refused, train
from image_noise import tree

from uvit_decay.data import AugmentedImages, Images
from uvit_decay.evaluation.open_by_name import open_data

NAMES = [f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(4)]
FLAGS = ["--data.batch_size=4", "--data.channels=1", "--model.net.num_classes=2", "--trainer.max_steps=1"]
FLAGS += ["--model.net.dim=16", "--model.net.depth=2", "--trainer.callbacks=[]", "--trainer.limit_val_batches=0"]


@pytest.fixture
def images(tmp_path):
    tree(tmp_path / "images", NAMES)
    return ["--data=Images", f"--data.path={tmp_path / 'images'}", *FLAGS]


def stored_size(folder):
    (path,) = (folder / "runs").rglob("config.yaml")
    return yaml.safe_load(path.read_text())["data"]["init_args"]["image_size"]


def test_images_take_the_size_that_is_set_for_the_network(images, tmp_path, monkeypatch):
    train(monkeypatch, tmp_path, "fit", *images, "--model.net.image_size=16")
    assert stored_size(tmp_path) == 16


def test_a_size_of_the_data_and_the_default_configuration_are_not_overruled(images, tmp_path, monkeypatch, capsys):
    line = refused(capsys, train, monkeypatch, tmp_path, "fit", *images)  # digits.yaml has a network of 8 pixels
    assert "--model.net.image_size 32 (or --data.image_size 8)" in line
    line = refused(
        capsys, train, monkeypatch, tmp_path, "fit", *images, "--data.image_size=32", "--model.net.image_size=16"
    )
    assert "--model.net.image_size 32 (or --data.image_size 16)" in line


def test_a_configuration_that_names_the_network_alone_decides(images, tmp_path, monkeypatch):
    values = yaml.safe_load((ROOT / "configs" / "digits.yaml").read_text())
    values["data"] = {"class_path": "Images", "init_args": {"path": str(tmp_path / "images")}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(values))
    train(monkeypatch, tmp_path, "fit", f"--config={tmp_path / 'own.yaml'}", *images)
    assert stored_size(tmp_path) == 8
    arguments = {"path": str(tmp_path / "images"), "channels": 1, "batch_size": 4}
    data = {"class_path": "uvit_decay.data.Images", "init_args": arguments}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump({"data": data}))
    assert open_data(str(tmp_path / "data.yaml"), None, 16, 1).train.images.shape[-1] == 16


@pytest.mark.parametrize(("kind", "size"), [(Images, 32), (AugmentedImages, 224)])
def test_in_python_the_sizes_are_those_they_were(kind, size):
    assert (kind("images").image_size, kind("images", image_size=64).image_size) == (size, 64)
