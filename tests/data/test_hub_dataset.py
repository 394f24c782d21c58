"""Image data sets of the `datasets` library, made here: as saved by it, and as folders that it reads."""

import io
import pickle
import sys

import pytest
import torch
from conftest import train
from image_noise import SIZE, noise, tar_of, tree
from PIL import Image
from refusals import raises_user_error

from uvit_decay.data import HubDataset, Images
from uvit_decay.data.hub_dataset import HubListing
from uvit_decay.data.named import open_data
from uvit_decay.evaluation.image_sources import DatasetImages
from uvit_decay.terminal.errors import UserError

datasets = pytest.importorskip("datasets")
LABELS = [1, 0, 1, 2, 0, 2, 1, 0]
NAMES = ("cat", "dog", "ant")  # not sorted, as in a ClassLabel


def rows(first=0, labels=LABELS, kind=None, **more):
    pictures = [Image.fromarray(noise(SIZE, SIZE, 3, seed=first + i)) for i in range(len(labels))]
    features = {"image": datasets.Image(), "label": kind or datasets.ClassLabel(names=list(NAMES))}
    features |= {name: datasets.Value("string") for name in more}
    return datasets.Dataset.from_dict(
        {"image": pictures, "label": labels, **more}, features=datasets.Features(features)
    )


@pytest.fixture
def saved(tmp_path):
    datasets.DatasetDict({"train": rows(), "test": rows(100, LABELS[:4])}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def opened(path, **options):
    data = HubDataset(str(path), **{"image_size": SIZE, "batch_size": 2, **options})
    data.setup()
    return data


def test_images_labels_and_classes_are_those_of_the_data_set(saved):
    data = opened(saved, test_split="test")
    assert data.class_names == NAMES
    assert data.train.labels.tolist() == LABELS
    expected = torch.stack([torch.from_numpy(noise(SIZE, SIZE, 3, seed=i)) for i in range(8)]).permute(0, 3, 1, 2)
    assert torch.equal(data.train.images, expected)
    assert (len(data.test), data.name, data.overlap) == (4, "saved", "")
    assert "test" in data.describe_test_images()


def test_large_sets_stay_in_their_memory_mapped_files_and_workers_get_their_names(saved):
    data, whole = opened(saved, memory_gb=0.0), opened(saved)
    (entry,) = data.train.listing.rows.cache_files
    assert entry["filename"].startswith(str(saved))
    content = pickle.dumps(data.train)
    assert noise(SIZE, SIZE, 3).tobytes() not in content
    assert torch.equal(pickle.loads(content)[[3, 1]][0], whole.train[[3, 1]][0])
    assert data.fingerprint == whole.fingerprint
    stored = DatasetImages("x", data.train, 3, data.class_names).fingerprint()
    assert stored != DatasetImages("x", opened(saved, memory_gb=0, split="test").train, 3, ()).fingerprint()


def test_an_image_folder_is_read_as_by_images(tmp_path):
    names = [f"train/{kind}/{i}.png" for kind in ("cat", "dog") for i in range(4)]
    tree(tmp_path / "folder", names)
    data, ours = opened(tmp_path / "folder", holdout=0.25), Images(str(tmp_path / "folder" / "train"), holdout=0.25)
    ours.image_size, ours.batch_size = SIZE, 2
    ours.setup()
    assert data.class_names == ours.class_names == ("cat", "dog")
    assert torch.equal(data.train.images, ours.train.images)
    assert torch.equal(data.test.images, ours.test.images)
    assert data.fingerprint == ours.fingerprint  # the same files


def test_other_pictures_of_the_same_labels_have_another_fingerprint(tmp_path):
    prints = []
    for first in (0, 0, 1):
        folder = tmp_path / str(len(prints))
        rows(first).save_to_disk(folder)
        prints.append(opened(folder).fingerprint)
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("kind", "labels", "expected"),
    [("string", ["b", "a", "b"], ("a", "b")), ("int64", [7, 5, 7], ("5", "7"))],
)
def test_labels_without_names_are_sorted(tmp_path, kind, labels, expected):
    rows(labels=labels, kind=datasets.Value(kind)).save_to_disk(tmp_path / "set")
    data = opened(tmp_path / "set")
    assert (data.class_names, data.train.labels.tolist()) == (expected, [1, 0, 1])
    data = opened(tmp_path / "set", label_column=None)
    assert (data.class_names, data.train.labels.tolist()) == ((), [0, 0, 0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": "validation"}, ("`split`", "train, test")),
        ({"image_column": "picture"}, ("`image_column`", "image, label")),
        ({"label_column": "class"}, ("`label_column`", "image, label")),
        ({"test_path": "x"}, ("`test_split`",)),
        ({"labels": "folders"}, ("`label_column`",)),
        ({"test_files": "x"}, ("`test_files`", "`files`")),
        ({"files": "x", "test_files": "x", "test_split": "test"}, ("`test_split`", "`test_files`")),
    ],
)
def test_what_does_not_fit_is_refused_with_the_flag(saved, options, words):
    with pytest.raises(UserError) as caught:
        opened(saved, **options)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("split", "options", "words"),
    [
        (None, {"split": "train[:3]"}, "`split` train"),
        (None, {"subset": "other"}, "`subset` other"),
        ("test", {"split": "train"}, "`split` test"),
    ],
)
def test_a_saved_set_has_no_other_split_and_no_subset(tmp_path, split, options, words):
    datasets.Dataset.from_dict(rows()[:], features=rows().features, split=split).save_to_disk(tmp_path / "set")
    assert len(opened(tmp_path / "set", split=split or "train").train) == len(LABELS)
    with raises_user_error(str(tmp_path / "set"), words):
        opened(tmp_path / "set", **options)


def test_rows_without_a_label_are_refused(tmp_path):
    rows(labels=[0, -1, 1]).save_to_disk(tmp_path / "set")
    with pytest.raises(UserError, match="`label_column` null"):
        opened(tmp_path / "set")


def test_without_the_library_one_line_names_the_command(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises_user_error("HubDataset", "pip install datasets"):
        opened(saved)


def test_the_same_split_for_both_is_said(saved):
    assert str(saved) in opened(saved, test_split="train").overlap


def test_a_run_trains_and_its_data_are_opened_by_evaluation(saved, tmp_path, monkeypatch):
    flags = ["--data=HubDataset", f"--data.path={saved}", "--data.test_split=test", "--data.batch_size=2"]
    flags += ["--data.channels=1", "--data.image_size=8", "--trainer.max_steps=2"]
    train(monkeypatch, tmp_path, "fit", *flags, "--model.net.dim=16", "--model.net.depth=2", "--trainer.callbacks=[]")
    (config,) = (tmp_path / "runs").rglob("config.yaml")
    data = open_data(str(config), None, 8, 1)
    assert isinstance(data, HubDataset)
    assert isinstance(data._listed[0], HubListing)


def write_shards(folder, ending, per_shard=3):
    """Shards as webdataset's ShardWriter writes them: the files of a sample one after the other, by extension."""
    folder.mkdir()
    for first in range(0, len(LABELS), per_shard):
        members = {}
        for i in range(first, min(first + per_shard, len(LABELS))):
            picture, label = io.BytesIO(), str(LABELS[i])
            Image.fromarray(noise(SIZE, SIZE, 3, seed=i)).save(picture, "PNG")
            members[f"{i:06d}.{ending}"] = (label if ending == "cls" else f'{{"label": {label}}}').encode()
            members[f"{i:06d}.png"] = picture.getvalue()
        tar_of(folder / f"shard-{first // per_shard:06d}.tar", members)
    return folder


@pytest.mark.parametrize("ending", ["cls", "json"])
def test_shards_of_webdataset(tmp_path, ending):
    folder = write_shards(tmp_path / "shards", ending)
    data = opened("webdataset", files=f"{folder}/shard-{{000000..000001}}.tar", test_files=f"{folder}/*1.tar")
    assert (data.train.labels.tolist(), data.class_names) == (LABELS[:6], ("0", "1", "2"))
    assert torch.equal(data.train.images[5].permute(1, 2, 0), torch.from_numpy(noise(SIZE, SIZE, 3, seed=5)))
    assert data.test.labels.tolist() == LABELS[3:6]
    assert data.overlap
    whole = opened("webdataset", files=[f"{folder}/*.tar"], memory_gb=0.0)
    assert whole.train.labels.tolist() == LABELS
    with raises_user_error("webdataset", "shard-000003.tar"):
        opened("webdataset", files=f"{folder}/shard-{{000001..000009}}.tar")
    with raises_user_error("webdataset", "`label_column`", "__key__"):
        opened("webdataset", files=f"{folder}/*.tar", label_column="class")


def test_parquet_by_its_files(tmp_path):
    rows(labels=[7, 5, 7], kind=datasets.Value("int64")).to_parquet(tmp_path / "a.parquet")
    data = opened("parquet", files=str(tmp_path / "*.parquet"))
    assert (data.train.labels.tolist(), len(data.class_names)) == ([7, 5, 7], 8)
