"""Folders that are the parts of a data set, by their names: which layouts are read so, and which are classes."""

from pathlib import Path

import pytest
import torch
from conftest import train
from image_noise import SIZE, tree, write_tar, write_zip
from refusals import find_line, raises_user_error

from uvit_decay.data import AugmentedImages, Images
from uvit_decay.data.labels import LabelOptions
from uvit_decay.data.listing import list_images, list_parts

TWO = ("cat", "dog")


def classed(*folders: str, classes=TWO) -> list[str]:
    """Two images for each class of each folder."""
    return [f"{folder}/{name}/{i}.png" for folder in folders for name in classes for i in range(2)]


def flat(*folders: str) -> list[str]:
    return [f"{folder}/{i}.png" for folder in folders for i in range(3)]


# Layout -> folder of the training images, folder of the test images (None: none is read), classes.
READ_AS_PARTS = [
    (classed("train", "val"), "train", "val", TWO),
    (classed("Training", "Testing"), "Training", "Testing", TWO),
    (classed("train2017", "val2017"), "train2017", "val2017", TWO),
    (classed("seg_train/seg_train", "seg_test/seg_test") + flat("seg_pred/seg_pred"), "seg_train", "seg_test", TWO),
    (classed("train", "test", "val"), "train", "val", TWO),
    (classed("images/train", "images/val"), "images/train", "images/val", TWO),
    (classed("trainset", "TestSet"), "trainset", "TestSet", TWO),
    (flat("train_images", "test_images"), "train_images", "test_images", ()),
    (flat("trainA", "testA", "testB"), "trainA", "testA", ()),
    (classed("train") + flat("test1"), "train", None, TWO),  # a test part without labels
    (classed("train") + flat("test1") + classed("val"), "train", "val", TWO),
    (classed("train") + classed("test", classes=("cat", "eel")), "train", None, TWO),  # other classes
    (classed("train") + classed("test", classes=("dog",)), "train", "test", TWO),  # fewer classes
]


@pytest.mark.parametrize(("names", "training", "testing", "classes"), READ_AS_PARTS)
@pytest.mark.parametrize("pack", [lambda folder, file: folder, write_zip, write_tar])
def test_folders_of_splits_are_read_as_training_and_test_images(
    tmp_path, caplog, pack, names, training, testing, classes
):
    path = pack(tree(tmp_path / "set", names), tmp_path / "packed")
    with caplog.at_level("INFO"):
        ours, test = list_parts(path)
    line = find_line(caplog.messages, path, training, "training images", "`labels` folders")
    alone = list_images(tmp_path / "set" / training)
    assert ours.class_names == classes
    assert ours.labels == (alone.labels if classes else (0,) * len(ours.members))
    assert all(name.startswith(f"{training}/") for name in ours.members)
    assert len(ours.members) == len(alone.members)
    if testing is None:
        assert test is None
        assert "not read" in line
    else:
        assert testing in line
        assert all(name.startswith(f"{testing}/") for name in test.members)
        assert {test.class_names[label] if classes else "" for label in test.labels} == {
            name.split("/")[-2] if classes else "" for name in test.members
        }
    assert list_images(path, None, LabelOptions(None)).class_names == ()
    assert len(list_images(path, None, LabelOptions("folders")).members) == len(names)


CLASSES = [
    (classed("train", "bus", "car", classes=("a",)), ("bus", "car", "train")),
    (flat("train", "ship"), ("ship", "train")),
    (flat("train_station", "test_tube"), ("test_tube", "train_station")),
    (flat("with_mask", "without_mask"), ("with_mask", "without_mask")),
    (flat("train", "training"), ("train", "training")),
    (flat("masks", "cat", "dog"), ("cat", "dog", "masks")),
]


@pytest.mark.parametrize(("names", "classes"), CLASSES)
def test_other_folders_are_classes(tmp_path, names, classes):
    training, test = list_parts(tree(tmp_path, names))
    assert (training.class_names, test) == (classes, None)


REFUSED = [
    (flat("trainA", "trainB", "testA", "testB"), "trainA"),
    (flat("images", "masks"), "images"),
    (flat("train", "train_labels", "val", "val_labels"), "train"),
    (flat("train/good", "test/good", "test/broken", "ground_truth/broken"), "train"),
    (flat("Train", "val", "extra"), "Train"),
    (flat("test", "val"), "val"),
]


@pytest.mark.parametrize(("names", "give"), REFUSED)
def test_what_is_neither_parts_nor_classes_is_refused_with_the_folder_to_give(tmp_path, names, give):
    folder = tree(tmp_path / "set", names)
    with raises_user_error(folder / give, "`labels` folders"):
        list_images(folder)
    with raises_user_error("unpack", f"folder {give}"):
        list_images(write_zip(folder, tmp_path / "set.zip"))
    assert len(list_images(folder, None, LabelOptions("folders")).class_names) > 1
    assert len(list_images(folder / give).members) == len([name for name in names if name.startswith(f"{give}/")])


@pytest.mark.parametrize("kind", [Images, AugmentedImages])
def test_a_run_on_the_folder_is_that_on_its_parts(tmp_path, caplog, kind):
    folder = tree(tmp_path / "set", classed("train", "val"))
    sizes = {"image_size": SIZE, "batch_size": 2}
    ours = kind(str(folder), holdout=0.5, **sizes)
    theirs = kind(str(folder / "train"), test_path=str(folder / "val"), **sizes)
    with caplog.at_level("INFO"):
        ours.setup()
    find_line(caplog.messages, "`holdout` 0.5", "not used")
    theirs.setup()
    assert ours.fingerprint == theirs.fingerprint
    assert (len(ours.train), len(ours.test)) == (4, 4)
    assert ours.describe_test_images() == theirs.describe_test_images()
    held_out = kind(str(tree(tmp_path / "other", classed("train") + flat("test1"))), holdout=0.5, **sizes)
    held_out.setup()
    assert len(held_out.test) == 2
    given = kind(str(folder), test_path=str(folder / "train"), **sizes)
    given.setup()
    assert given.overlap  # test_path wins


def test_labels_in_tables_of_the_parts_are_read(tmp_path):
    folder = tree(tmp_path, flat("train", "test"))
    for part in ("train", "test"):
        rows = "".join(f"{i}.png,{'dog' if i else 'cat'}\n" for i in range(3))
        (folder / part / "metadata.csv").write_text(f"file_name,label\n{rows}")
    training, test = list_parts(folder)
    assert (training.labels, test.labels, test.class_names) == ((0, 1, 1), (0, 1, 1), TWO)
    (folder / "metadata.csv").write_text("file_name,label\n" + "".join(f"{name},x\n" for name in flat("train", "test")))
    training, test = list_parts(folder)  # a table of all images
    assert (len(training.members), test) == (6, None)


def test_a_class_list_chooses_from_both_parts(tmp_path):
    folder = tree(tmp_path, classed("train", "test", classes=("ant", "cat", "dog")))
    training, test = list_parts(folder, ["dog", "ant"])
    assert training.class_names == test.class_names == ("ant", "dog")
    assert {Path(name).parts[1] for name in test.members} == {"ant", "dog"}


@pytest.mark.parametrize("ckpt_path", ["last.ckpt", "auto"])
@pytest.mark.parametrize("folders", [("Training", "Testing"), ("images", "masks"), ("Training", "Testing", "more")])
def test_a_run_that_took_such_folders_for_classes_resumes_with_them(tmp_path, monkeypatch, caplog, ckpt_path, folders):
    folder = tree(tmp_path / "set", classed(*folders))
    flags = ["--data=Images", f"--data.path={folder}", "--data.image_size=8", "--data.batch_size=2"]
    flags += ["--model.net.dim=16", "--model.net.depth=2", "--model.net.patch_size=2", "--model.init_from=null"]
    flags += ["--trainer.callbacks=LastCheckpoint", "--trainer.limit_val_batches=0"]
    train(monkeypatch, tmp_path, "fit", *flags, "--data.labels=folders", "--trainer.max_steps=2")
    (checkpoint,) = (tmp_path / "runs").rglob("last.ckpt")
    contents = torch.load(checkpoint, weights_only=True)
    contents["settings"]["data.labels"] = "auto"  # as the run of an earlier version has it
    torch.save(contents, checkpoint)
    before = contents["uvit_decay"]["data_hash"]
    path = checkpoint if ckpt_path == "last.ckpt" else ckpt_path
    with caplog.at_level("INFO"):
        train(monkeypatch, tmp_path, "fit", *flags, "--trainer.max_steps=4", f"--ckpt_path={path}")
    find_line(caplog.messages, "--data.labels folders", *folders)
    (checkpoint,) = (tmp_path / "runs").rglob("last.ckpt")  # in the same run
    contents = torch.load(checkpoint, weights_only=True)
    assert contents["global_step"] == 4
    assert contents["uvit_decay"]["data_hash"] == before
