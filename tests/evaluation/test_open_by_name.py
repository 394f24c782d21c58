"""Images from anywhere: the same ones, whatever they come in, and one clear line for what is wrong."""

import json
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import find_line, raises_user_error

from uvit_decay.data import Images
from uvit_decay.data.decoding import Decoding, ResizedCentre
from uvit_decay.data.listing import list_images
from uvit_decay.data.named import open_data
from uvit_decay.data.reading import OnDisk
from uvit_decay.encoders.table import FeatureOptions
from uvit_decay.evaluation.comparison import open_reference
from uvit_decay.evaluation.image_sources import DatasetImages
from uvit_decay.evaluation.open_by_name import open_images
from uvit_decay.pictures import save_npz, save_pngs, to_pil


@pytest.fixture(scope="module")
def images():
    return torch.randint(256, (12, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.fixture
def forms(images, tmp_path):
    """Return the same images as a folder, a zip, an array and a compressed array."""
    (tmp_path / "folder").mkdir()
    save_pngs(tmp_path / "folder", [images])
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        for path in sorted((tmp_path / "folder").iterdir()):
            archive.write(path, path.name)
    save_npz(tmp_path / "array.npz", [images], len(images), list(range(12)))
    np.savez_compressed(tmp_path / "packed.npz", arr_0=images.permute(0, 2, 3, 1).numpy())
    return tmp_path


@pytest.mark.parametrize("name", ["folder", "zipped.zip", "array.npz", "packed.npz"])
def test_the_same_images_in_every_form(forms, images, name):
    source = open_images(str(forms / name), 3)
    assert (len(source), source.shape) == (12, (3, 16, 16))
    assert torch.equal(torch.cat([source.read(range(5)), source.read(range(5, 12))]), images)
    assert source.fingerprint() == open_images(str(forms / name), 3).fingerprint()
    assert not source.has_jpegs


@pytest.mark.parametrize("name", ["folder", "array.npz"])
def test_colours_become_grey_in_every_form(forms, images, name):
    expected = [np.asarray(to_pil(image).convert("L")) for image in images]
    assert (open_images(str(forms / name), 1).read(range(12))[:, 0].numpy() == np.stack(expected)).all()


def test_named_protocols_drop_transparency(forms):
    clear = Image.new("RGBA", (16, 16), (200, 100, 0, 0))
    clear.save(forms / "folder" / "000003.png")
    pixels, prints = [], []
    for features in (FeatureOptions(features="small-cnn"), FeatureOptions(protocol="clean")):
        source = open_images(str(forms / "folder"), 3, on_white=features.on_white)
        pixels.append(source.read([3])[0, :, 0, 0].tolist())
        prints.append(source.fingerprint())
    assert pixels == [[255, 255, 255], [200, 100, 0]]
    assert prints[0] != prints[1]


def test_other_images_and_channels_have_another_identity(forms, images):
    folder = open_images(str(forms / "folder"), 3).fingerprint()
    Image.fromarray(images[0].permute(1, 2, 0).numpy()).resize((16, 16)).save(forms / "folder" / "more.png")
    assert open_images(str(forms / "folder"), 3).fingerprint() != folder
    grey, colour = (open_images(str(forms / "array.npz"), channels) for channels in (1, 3))
    assert grey.fingerprint() != colour.fingerprint()
    assert colour.labels.tolist() == list(range(12))


def test_data_sets_and_configurations(tmp_path):
    train, test = open_images("digits:train", 1), open_images("digits:test", 1)
    assert (len(train), len(test), train.name) == (1437, 360, "digits-train")
    assert train.class_names == tuple("0123456789")
    (tmp_path / "own.yaml").write_text("data:\n  class_path: uvit_decay.data.Digits\n")
    configured = open_images(f"{tmp_path / 'own.yaml'}:test", 1)
    assert torch.equal(configured.read(range(360)), test.read(range(360)))
    rgb = open_images("digits:test", 3)
    assert torch.equal(rgb.read([7]), test.read([7]).expand(1, 3, 8, 8))


def test_a_configuration_without_a_size_takes_it_from_its_images(forms, images):
    options = {"path": str(forms / "folder"), "image_size": None, "batch_size": 4}
    (forms / "own.yaml").write_text(
        json.dumps({"data": {"class_path": "uvit_decay.data.Images", "init_args": options}})
    )
    source = open_images(f"{forms / 'own.yaml'}:train", 3)
    assert torch.equal(source.read(range(12)), images)


def test_images_of_many_sizes_are_refused_or_cropped(forms, images):
    image = Image.fromarray(images[0].permute(1, 2, 0).numpy())
    image.resize((20, 24)).save(forms / "folder" / "z.png")
    with raises_user_error("1 of 13", "z.png", "20x24", "16x16", "`image_size`"):
        open_images(str(forms / "folder"), 3)
    assert open_images(str(forms / "folder"), 3, 16).read(range(13)).shape == (13, 3, 16, 16)
    image.resize((20, 24)).save(forms / "folder" / "0.png")
    with raises_user_error("0.png", "20x24", "`image_size`"):
        open_images(str(forms / "folder"), 3)


def test_jpegs_are_told(tmp_path, images):
    Image.fromarray(images[0].permute(1, 2, 0).numpy()).save(tmp_path / "a.JPG")
    assert open_images(str(tmp_path), 3).has_jpegs
    (tmp_path / "b.jpeg").write_bytes((tmp_path / "a.JPG").read_bytes())
    for memory_gb in (4.0, 0.0):
        data = Images(str(tmp_path), image_size=16, batch_size=1, holdout=0.5, memory_gb=memory_gb)
        data.setup()
        assert DatasetImages("part", data.test, 3, ()).has_jpegs


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", ("nowhere", "folder", "zip", "tar")),
        ("first.npz", "uint8 (2, 3, 4, 4)"),
        ("digits:valid", ("digits:valid", "train", "test")),
        ("own.yaml:train", ("own.yaml", "data", "dict")),
        ("size.yaml:train", ("size.yaml", "data", "uvit_decay.data.Digits", "batch_size", "int", "'x'")),
    ],
)
def test_wrong_names_and_arrays(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    np.savez("first.npz", arr_0=np.zeros((2, 3, 4, 4), np.uint8))
    (tmp_path / "own.yaml").write_text("model: 3\n")
    (tmp_path / "size.yaml").write_text("data: {class_path: uvit_decay.data.Digits, init_args: {batch_size: x}}\n")
    with raises_user_error(message):
        open_images(name, 3)


def test_references_are_statistics_images_or_both(tmp_path):
    numbers = {"mu": np.zeros(4), "sigma": np.eye(4)}
    images = {"arr_0": np.zeros((2, 4, 4, 3), np.uint8)}
    for arrays, count in ((numbers, None), (numbers | images, 2), (images, 2)):
        np.savez(tmp_path / "a.npz", **arrays)
        file, reference = open_reference(str(tmp_path / "a.npz"), 3)
        assert (file is not None and file.has("features")) == ("mu" in arrays)
        assert (file is None) == ("mu" not in arrays)
        assert (reference if reference is None else len(reference)) == count


def test_reports_say_which_images_were_the_test_images(forms, images):
    for name in "ab":
        (forms / "labelled" / name).mkdir(parents=True)
        save_pngs(forms / "labelled" / name, [images[:6]])
    path = str(forms / "labelled")
    assert "%" not in open_data("digits", None, 8, 1).describe_test_images()
    assert open_data(path, path, 16, 3).describe_test_images().startswith(f"{path}; ")  # they are the training images
    held_out = open_data(path, None, 16, 3)
    find_line(held_out.describe_test_images(), "10%", "already seen")
    find_line(held_out.describe_test_images("another"), "10%", "already seen")
    assert "already seen" not in held_out.describe_test_images(held_out.fingerprint)


def test_errors_of_data_name_the_arguments_of_the_command(tmp_path, images):
    with raises_user_error("`test` elsewhere", "digits"):
        open_data("digits", "elsewhere", 8, 1)
    for name, image in zip("ab", images, strict=False):
        (tmp_path / name).mkdir()
        save_pngs(tmp_path / name, [image[None]])
    with raises_user_error("`holdout`", "`test`") as caught:  # one picture in each class: none can be held out
        open_data(str(tmp_path), None, 16, 3)
    assert "test_path" not in str(caught.value)


def test_the_fingerprint_of_a_set_on_disk_has_its_part_size_and_crop_unless_it_is_the_usual_one(forms):
    listing = list_images(forms / "folder")
    sets = [([0, 1], Decoding(4, 3)), ([0, 2], Decoding(4, 3)), ([0, 1], Decoding(8, 3)), ([0, 1], Decoding(4, 1))]
    for crop in (ResizedCentre(0.5), ResizedCentre(1.0)):
        sets.append(([0, 1], Decoding(4, 3, crop=crop)))
    prints = []
    for chosen, decoding in sets:
        source = DatasetImages("x", OnDisk(listing, chosen, decoding), 3, listing.class_names)
        prints.append(json.dumps(source.fingerprint()))
    assert len(set(prints)) == len(sets)
    assert "crop" not in prints[0]  # results of the usual crop keep their keys
