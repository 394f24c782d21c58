"""Labels of images that are not their folders, in the layouts that other tools write, and class folders."""

import csv
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from image_noise import SIZE, noise, tar_of, tree, write_tar, write_zip
from PIL import Image
from refusals import find_line, raises_user_error
from torchvision.datasets import ImageFolder

from uvit_decay.data import AugmentedImages, Images
from uvit_decay.data.decoding import Decoding
from uvit_decay.data.label_tables import Columns
from uvit_decay.data.labels import LabelOptions
from uvit_decay.data.listing import describe_listing, list_images
from uvit_decay.data.named import open_data
from uvit_decay.data.reading import read
from uvit_decay.evaluation.open_by_name import open_images
from uvit_decay.latents.encode import describe
from uvit_decay.latents.space import LatentSpace

LABELS = [6, 9, 9, 4, 1, 1, 2, 7]
ENCODING = {"class_list": None, "dtype": "float16", "precision": "float32", "batch_size": 2, "shard_size": 8}
WORDS = ["dog", "cat", "cat", "ant", "dog", "ant", "cat", "dog"]


def write_edm(file: Path, labels: list | None, shard: int = 3) -> Path:
    """A zip as EDM's dataset_tool.py writes it, with `shard` images per folder instead of 1,000."""
    with zipfile.ZipFile(file, mode="w", compression=zipfile.ZIP_STORED) as archive:
        entries = []
        for index in range(len(LABELS)):
            name = f"{index // shard:05d}/img{index:08d}.png"
            bits = io.BytesIO()
            image = Image.fromarray(noise(SIZE, SIZE, 3, seed=index), "RGB")
            image.save(bits, format="png", compress_level=0, optimize=False)
            archive.writestr(name, bits.getbuffer())
            entries.append([name, None if labels is None else labels[index]])
        archive.writestr("dataset.json", json.dumps({"labels": None if labels is None else entries}))
    return file


def unpack(file: Path, folder: Path) -> Path:
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)
    return folder


def opened(path, kind=Images, **options):
    data = kind(str(path), image_size=SIZE, batch_size=2, **options)
    data.setup()
    return data


def check_pixels(listing):
    """Compare all images with Pillow's."""
    pixels = read(listing, Decoding(SIZE, 3))
    for row, name in zip(pixels, listing.members, strict=True):
        with listing.open() as fetch, Image.open(fetch(listing.members.index(name))) as image:
            assert torch.equal(row, torch.from_numpy(np.array(image)).permute(2, 0, 1))


def packed(folder: Path, file: Path) -> list[Path]:
    """The folder, and its archives with and without a folder around it."""
    return [folder, write_zip(folder, file.with_suffix(".zip"), "outer/"), write_tar(folder, file.with_suffix(".tar"))]


def test_an_edm_archive_has_the_labels_of_its_json_in_everything_that_reads_images(tmp_path, caplog):
    file = write_edm(tmp_path / "edm.zip", LABELS)
    names = tuple(map(str, range(10)))
    prints = set()
    for path in packed(unpack(file, tmp_path / "edm"), tmp_path / "again"):
        listing = list_images(path)
        assert (list(listing.labels), listing.class_names) == (LABELS, names)
        check_pixels(listing)
        assert (len(listing.members), sum(listing.labels)) == (len(LABELS), sum(LABELS))
        prints.add(opened(path).fingerprint if path.suffix != ".zip" else "")
    with caplog.at_level("INFO"):
        data = opened(file, memory_gb=0.0)
    line = find_line(caplog.messages, "dataset.json", "10 classes", "4 of them without images")
    assert "`labels` folders" in line
    assert (data.train.labels.tolist(), data.class_names) == (LABELS, names)
    for other in (opened(file, AugmentedImages), open_data(str(file), str(file), SIZE, 3)):
        assert (other.train.labels.tolist(), other.class_names) == (LABELS, names)
    images = open_images(str(file), 3)
    assert (images.labels.tolist(), images.class_names) == (LABELS, names)
    manifest = describe(list_images(file), LatentSpace("vae", "", 1.0, 0.0, channels=4, factor=8), 8, **ENCODING)
    assert manifest.classes == dict(zip(names, np.bincount(LABELS).tolist(), strict=True))
    forced = opened(file, labels="folders")
    assert forced.class_names == ("00000", "00001", "00002")
    assert opened(file, labels=None).class_names == ()


def test_shards_without_labels_are_no_classes_but_class_folders_are(tmp_path):
    listing = list_images(write_edm(tmp_path / "edm.zip", None))
    assert (listing.class_names, len(listing.members)) == ((), len(LABELS))
    folder = tree(tmp_path / "own", ["cat/a.png", "dog/a.png"])
    (folder / "dataset.json").write_text('{"labels": null}')
    assert list_images(folder).class_names == ("cat", "dog")


def write_metadata(folder: Path, kind: str, **columns: list) -> Path:
    """A folder for Hugging Face's imagefolder, whose metadata has these columns beside file_name."""
    names = [f"{index:04}.png" for index in range(len(LABELS))]
    tree(folder, names)
    rows = [dict(zip(("file_name", *columns), row, strict=True)) for row in zip(names, *columns.values(), strict=True)]
    if kind == "jsonl":
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "metadata.parquet")
    else:
        with open(folder / "metadata.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize(("column", "values"), [("label", LABELS), ("species_label", WORDS)])
def test_metadata_of_an_imagefolder(tmp_path, kind, column, values):
    folder = write_metadata(
        tmp_path / "set", kind, **{"text": ["a caption, with a comma"] * len(LABELS), column: values}
    )
    expected = [sorted(set(WORDS)).index(value) if value in WORDS else value for value in values]
    for path in packed(folder, tmp_path / "packed"):
        listing = list_images(path)
        assert list(listing.labels) == expected
        check_pixels(listing)


def test_a_damaged_parquet_file_is_named(tmp_path):
    folder = write_metadata(tmp_path / "set", "parquet", label=LABELS)
    file = folder / "metadata.parquet"
    for content in (b"", b"PAR1 no", file.read_bytes()[:-20]):
        file.write_bytes(content)
        with raises_user_error("metadata.parquet"):
            list_images(folder)


def test_captions_are_no_labels_unless_asked_for(tmp_path, caplog):
    folder = write_metadata(tmp_path / "set", "jsonl", text=WORDS)
    with caplog.at_level("INFO"):
        assert list_images(folder).class_names == ()
    find_line(caplog.messages, "metadata.jsonl", "`label_column`", "text")
    assert opened(folder, label_column="text").class_names == ("ant", "cat", "dog")
    folder = write_metadata(tmp_path / "two", "csv", fine_label=WORDS, coarse_label=LABELS)
    with raises_user_error("metadata.csv", "`label_column`", "fine_label, coarse_label"):
        list_images(folder)
    assert opened(folder, label_column="coarse_label").train.labels.tolist() == LABELS


def write_pictures(folder: Path, count: int = 4, ending: str = ".png") -> tuple[Path, list[str]]:
    """A folder of pictures and their names, of which the first ones may be read as words of a header."""
    names = [f"{kind}{ending}" for kind in ("a", "b", "c", "d", *map(str, range(count - 4)))]
    return tree(folder, names), names


@pytest.mark.parametrize("word", ["file", "id", "label"])
def test_the_first_label_of_a_table_without_header_is_a_label_whatever_its_word(tmp_path, word):
    folder, names = write_pictures(tmp_path / "set")
    rows = [f"{name},{label}" for name, label in zip(names, [word, "x", "x", word], strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    listing = list_images(folder, None, LabelOptions(str(tmp_path / "t.csv")))
    assert listing.class_names == tuple(sorted([word, "x"]))
    assert [listing.class_names[label] for label in listing.labels] == [word, "x", "x", word]


FOUR = ("a", "b", "c", "d")
NUMBERED = "class id,filepaths,labels,data set\n" + "".join(
    f"{i % 2},{n}.png,{'xy'[i % 2]},train\n" for i, n in enumerate(FOUR)
)
CELEBA = "Smiling Young\n" + "".join(f"{n}.png {'-1' if n in 'ab' else ' 1'} 1\n" for n in FOUR)
# Table, columns that are given, and the labels or the words of the refusal.
FILES = [
    (NUMBERED, (), ("`name_column`", "`label_column`", "class id, filepaths, labels")),
    (NUMBERED, ("filepaths", "labels"), ["x", "y", "x", "y"]),
    (NUMBERED, ("filepaths", None), ("`label_column`", "class id, labels")),
    (
        "photo,age,breed\na.png,3,pug\nb.png,4,pug\nc.png,1,asp\nd.png,1,asp\n",
        (None, "breed"),
        ["pug"] * 2 + ["asp"] * 2,
    ),
    ("breed,photo\nx,a.png\nx,b.png\ny,c.png\ny,d.png\n", (None, "breed"), ["x", "x", "y", "y"]),
    ("breed,photo\nx,a.png\nx,b.png\ny,c.png\ny,d.png\n", (), ("`name_column`",)),
    ("ImageId,PredictionString\na,n1 3\nb,n1 3\nc,n2 7\nd,n2 7\n", (), ["n1 3"] * 2 + ["n2 7"] * 2),
    ("label,file_name\nx,a.png\nx,b.png\ny,c.png\ny,d.png\n", (), ["x", "x", "y", "y"]),
    ("a x 1 2\nb x 1 2\nc y 1 2\nd y 1 2\n", (), ["x", "x", "y", "y"]),
    ("scan,class_id\na.png,1\nb.png,0\nc.png,1\nd.png,0\n", (), ["1", "0", "1", "0"]),
    ("a.png;x\nb.png;y\nc.png;x\nd.png;y\n", (), ("4 rows", "a.png")),
    ("4\n" + CELEBA, (), ("1 rows", "4")),
    ("file_name " + CELEBA, (None, "Smiling"), ("-1", "write 0")),
    ("file_name " + CELEBA.replace("-1", "0"), (None, "Smiling"), ["0", "0", "1", "1"]),
    ("a.png,-1\nb.png,1\nc.png,1\nd.png,1\n", (), ("-1", "write 0")),
    ("a.png,x\nb.png,x\nc.png,y\nd.png\n", (), ("1 rows", "d.png")),
]


@pytest.mark.parametrize(("text", "columns", "expected"), FILES)
def test_a_table_of_ones_own(tmp_path, text, columns, expected):
    folder, _ = write_pictures(tmp_path / "set")
    (tmp_path / "table.txt").write_text(text)
    options = LabelOptions(str(tmp_path / "table.txt"), Columns(*columns))
    if isinstance(expected, tuple):
        with raises_user_error("table.txt", *expected):
            list_images(folder, None, options)
    else:
        listing = list_images(folder, None, options)
        assert [listing.class_names[label] for label in listing.labels] == expected


def test_more_than_half_as_many_classes_as_pictures_is_said(tmp_path):
    folder, names = write_pictures(tmp_path / "set", 12)
    file = tmp_path / "table.csv"
    for count, said in ((12, True), (7, True), (6, False)):
        file.write_text("ImageId,PredictionString\n" + "".join(f"{n},p{i % count}\n" for i, n in enumerate(names)))
        line = describe_listing(list_images(folder, None, LabelOptions(str(file))))
        assert ("`label_column`" in line) == said
        find_line(line, "12 pictures", f"{count} classes")


def test_nfc_and_nfd_spellings_are_one_class(tmp_path):
    folder = tree(tmp_path / "set", ["cafe\u0301/1.png", "caf\u00e9/2.png", "cat/3.png"])
    assert list_images(folder).class_names == ("caf\u00e9", "cat")
    assert list_images(folder).labels == (0, 0, 1)
    one = tree(tmp_path / "one", ["cafe\u0301/1.png", "cat/2.png"])
    other = tree(tmp_path / "other", ["caf\u00e9/3.png", "cat/4.png"])
    data = opened(one, test_path=str(other))
    assert (data.class_names, data.test.labels.tolist()) == (("cafe\u0301", "cat"), [0, 1])
    assert len(list_images(one, ["caf\u00e9"]).members) == 1
    (tmp_path / "table.csv").write_text("caf\u00e9/1.png,caf\u00e9\ncat/2.png,cafe\u0301\n")
    assert list_images(one, None, LabelOptions(str(tmp_path / "table.csv"))).class_names == ("caf\u00e9",)


def test_a_single_folder_around_pictures_is_said_to_be_the_only_class(tmp_path, caplog):
    folder = tree(tmp_path / "celeba", ["img_align_celeba/1.png", "img_align_celeba/2.png"])
    with caplog.at_level("INFO"):
        assert list_images(folder).class_names == ("img_align_celeba",)
    find_line(caplog.messages, folder, "img_align_celeba", "only class", "`labels` null")


ANNOTATIONS = "val_0.JPEG\tn02\t0\t32\t44\t62\nval_1.JPEG\tn01\t52\t55\t57\t59\nval_2.JPEG\tn02\t4\t0\t60\t55\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("val_annotations.txt", ANNOTATIONS),  # of Tiny-ImageNet
        ("val.txt", "images/val_0.JPEG n02\nimages/val_1.JPEG n01\nimages/val_2.JPEG n02\n"),  # of Caffe's converter
        ("labels.csv", "id,breed\nval_0,n02\nval_1,n01\nval_2,n02\n"),  # of a Kaggle competition
        ("own.csv", "picture,class\nval_0.JPEG,n02\nval_1.JPEG,n01\nval_2.JPEG,n02\n"),
        ("no_header.txt", "val_0 n02\nval_1 n01\nval_2 n02\n"),
        ("table.tsv", "\ufefffile_name\tsplit\tclass\nval_0.JPEG\tx\tn02\nval_1.JPEG\tx\tn01\nval_2.JPEG\tx\tn02\n"),
        ("windows.csv", "Path,Label\r\nimages\\val_0.JPEG,n02\r\nimages\\val_1.JPEG,n01\r\nimages\\val_2.JPEG,n02\r\n"),
    ],
)
def test_a_table_names_images_as_its_writer_does(tmp_path, name, text):
    folder = tree(tmp_path / "val", [f"images/val_{i}.JPEG" for i in range(3)])
    (tmp_path / name).write_text(text)
    train = tree(tmp_path / "train", [f"{kind}/images/{kind}_{i}.JPEG" for kind in ("n01", "n02") for i in range(2)])
    data = opened(train, test_path=str(folder), test_labels=str(tmp_path / name))
    assert data.class_names == ("n01", "n02")
    assert data.train.labels.tolist() == [0, 0, 1, 1]
    assert data.test.labels.tolist() == [1, 0, 1]


def test_a_table_of_file_names_finds_images_at_the_top_and_in_folders(tmp_path):
    folder = tree(tmp_path / "set", ["a.png", "more/b.png", "more/c.png"])
    (tmp_path / "table.csv").write_text("a.png,cat\nb.png,dog\nc.png,cat\n")
    listing = list_images(folder, None, LabelOptions(str(tmp_path / "table.csv")))
    assert [listing.class_names[label] for label in listing.labels] == ["cat", "dog", "cat"]


@pytest.mark.parametrize("test_labels", ["auto", "folders"])
def test_the_column_of_the_training_labels_asks_for_no_table_of_the_test_images(tmp_path, test_labels):
    train = tree(tmp_path / "train", ["a.png", "b.png"])
    test = tree(tmp_path / "test", ["cat/c.png", "dog/d.png"])
    (tmp_path / "train.csv").write_text("file_name,fine_label,coarse_label\na.png,dog,x\nb.png,cat,x\n")
    options = {"labels": str(tmp_path / "train.csv"), "label_column": "fine_label"}
    data = opened(train, test_path=str(test), test_labels=test_labels, **options)
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([1, 0], [0, 1])
    with raises_user_error("table", "`label_column`"):
        opened(test, label_column="fine_label")


def test_test_images_may_lack_the_last_class_indices(tmp_path):
    train, test = write_edm(tmp_path / "train.zip", LABELS), write_edm(tmp_path / "test.zip", [0, 1] * 4)
    data = opened(train, test_path=str(test))
    assert (data.test.labels.tolist(), len(data.class_names)) == ([0, 1] * 4, 10)
    with raises_user_error("different classes"):
        opened(test, test_path=str(train))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([["b.png", 0]], ("1 of 2", "a.png", "`labels` folders")),
        ([["a.png", 0.5], ["b.png", 1]], ("1 of 2", "0.5")),
        ([["a.png", None], ["b.png", 1]], ("1 of 2", "None")),
        ([["a.png", -1], ["b.png", 1]], ("1 of 2", "-1")),
        ([["a.png", 10**9], ["b.png", 1]], ("1 of 2", str(10**9))),
        ([["a.png", 0], ["a.png", 1], ["b.png", 1]], ("1 names", "a.png")),
        ([["a.png"]], ("expected 2",)),
    ],
)
def test_a_table_that_does_not_fit_is_refused_with_a_count_and_the_first(tmp_path, entries, words):
    folder = tree(tmp_path / "set", ["a.png", "b.png"])
    (folder / "dataset.json").write_text(json.dumps({"labels": entries}))
    with raises_user_error("dataset.json", *words):
        list_images(folder)
    assert list_images(folder, None, LabelOptions("folders")).class_names == ()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("table.csv", "a.png;cat\nb.png;dog\n", ("a.png;cat", "commas")),
        ("table.txt", "2\na.png 0\nb.png 1\n", ("'2'", "remove")),
        ("table.jsonl", '[{"file_name": "a.png", "label": 1}]\n', ("line 1",)),
        ("table.jsonl", '{"file_name": "a.png", "label": 1}\n{"label": 1}\n', ("1 of 2", "b.png")),
    ],
)
def test_a_damaged_table_of_ones_own_is_one_line(tmp_path, name, text, words):
    folder = tree(tmp_path / "set", ["a.png", "b.png"])
    (tmp_path / name).write_text(text)
    with raises_user_error(name, *words):
        list_images(folder, None, LabelOptions(str(tmp_path / name)))


def test_names_may_be_numbers(tmp_path):
    folder = tree(tmp_path / "set", ["1.png", "2.png"])
    (tmp_path / "table.jsonl").write_text('{"id": 1, "label": "dog"}\n{"id": 2, "label": "cat"}\n')
    options = LabelOptions(str(tmp_path / "table.jsonl"), Columns("id"))
    assert list_images(folder, None, options).labels == (1, 0)


def test_an_entry_without_an_image_is_said(tmp_path, caplog):
    folder = tree(tmp_path / "set", ["a.png", "b.png"])
    (folder / "metadata.csv").write_text("file_name,label\na.png,x\nb.png,y\nc.png,z\nd.png,z\n")
    with caplog.at_level("INFO"):
        assert list_images(folder).class_names == ("x", "y")
    find_line(caplog.messages, "2 of 4", "c.png")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"labels": "nowhere.csv"}, ("`labels`", "nowhere.csv", "leaf")),
        ({"label_column": "label"}, ("`label_column`",)),
        ({"labels": "table.csv", "label_column": "x"}, ("`label_column`", "label, split")),
        ({"labels": "table.csv", "name_column": "x"}, ("`name_column`", "file, label, split")),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    folder = tree(tmp_path / "set", ["a.png", "b.png"])
    Path("table.csv").write_text("file,label,split\na.png,0,x\nb.png,1,x\n")
    with raises_user_error(*words):
        opened(folder, **options)


def test_a_damaged_json_is_refused_and_not_taken_for_no_labels(tmp_path):
    folder = tree(tmp_path / "set", ["cat/a.png", "dog/b.png"])
    (folder / "dataset.json").write_text('{"labels": [["cat/a.png", 0], ')
    with raises_user_error(folder / "dataset.json"):
        list_images(folder)


@pytest.mark.parametrize(
    "names",
    [
        ["n01/images/n01_0.JPEG", "n01/images/n01_1.JPEG", "n02/images/n02_0.JPEG"],  # Tiny-ImageNet
        ["dogs/husky/1.png", "dogs/poodle/1.png", "cats/siamese/1.png", "dogs/0.png"],
        ["cats/1.png", "cats/2.png"],
    ],
)
def test_class_folders_are_those_of_image_folder(tmp_path, names):
    folder = tree(tmp_path / "set", names)
    theirs = ImageFolder(folder)
    labels = {Path(name).relative_to(folder).as_posix(): label for name, label in theirs.samples}
    for path, outer in zip(packed(folder, tmp_path / "packed"), ("", "outer/", ""), strict=True):
        listing = list_images(path)
        assert listing.class_names == tuple(theirs.classes)
        ours = {name.removeprefix(outer): label for name, label in zip(listing.members, listing.labels, strict=True)}
        assert ours == labels
        check_pixels(listing)
    prints = {opened(path).fingerprint for path in (folder, tmp_path)}
    assert len(prints) == 1


def test_the_path_below_the_class_tells_images_apart(tmp_path):
    train = tree(tmp_path / "train", ["dogs/husky/1.png", "dogs/poodle/2.png", "cats/siamese/3.png"])
    test = tree(tmp_path / "test", ["dogs/poodle/1.png", "cats/husky/1.png"])
    (test / "cats/husky/1.png").write_bytes((train / "dogs/husky/1.png").read_bytes())
    assert opened(train, test_path=str(test)).overlap == ""
    (test / "dogs/husky").mkdir()
    (test / "dogs/husky/1.png").write_bytes((train / "dogs/husky/1.png").read_bytes())
    assert "dogs/husky/1.png" in opened(train, test_path=str(test)).overlap


@pytest.mark.parametrize(
    ("names", "before", "labels"),
    [
        (["cats/1.png", "cats/2.png", "dogs/1.png"], "6b0fc2a6", "auto"),
        (["dogs/husky/1.png", "dogs/poodle/1.png", "cats/siamese/1.png"], "0ddf9d3a", "leaf"),
        (["00000/img00000000.png", "00000/img00000001.png", "00001/img00000002.png"], "e4213b4e", "folders"),
        (["cafe\u0301/1.png", "cat/1.png"], "3bcbe53a", "auto"),
    ],
)
def test_fingerprints_stay_the_same(tmp_path, names, before, labels):
    for size, name in enumerate(names, 1):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (size, size)).save(tmp_path / name, "BMP")
    assert opened(tmp_path, labels=labels, memory_gb=0.0).fingerprint.startswith(before)  # as ac8466d5 printed it


def test_an_image_that_a_tar_holds_under_two_names_is_refused(tmp_path):
    path = tar_of(tmp_path / "a.tar", {"./1.png": b"", "1.png": b"", "metadata.csv": b"file_name,label\n1.png,cat\n"})
    with raises_user_error(path, "1.png"):
        list_images(path)
