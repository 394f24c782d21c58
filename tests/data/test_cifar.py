"""CIFAR as the official batches hold it: torchvision reads the same, and nothing in a pickle is run."""

import os
import pickle
import pickletools
import tarfile
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from cifar_files import REAL_PYTHON2, SETS, WRITERS, Python2, Runs, contents, md5, served, write_cifar
from torchvision import datasets

from uvit_decay.data import CIFAR10, CIFAR100
from uvit_decay.runtime.errors import UserError

TRAIN = contents(CIFAR100)["train"]
WHOLE = Python2.dumps(TRAIN)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a set of tiny files into <tmp_path>/data and declares them the official ones; the extracted folder."""

    def write(cifar, dumps=Python2.dumps, **changes):
        official = SETS[cifar]
        (tmp_path / "data").mkdir()
        folder = write_cifar(cifar, tmp_path / "data", dumps, **changes)
        for part in ("train_list", "test_list"):
            md5s = [[name, md5(folder / name)] for name, _ in getattr(official, part)]
            monkeypatch.setattr(official, part, md5s)
        meta = folder / official.meta["filename"]
        monkeypatch.setattr(official, "meta", {**official.meta, "md5": md5(meta)})
        return folder

    return write


@pytest.fixture
def archive(write, tmp_path, monkeypatch):
    """Packs a tiny set as the official archive, in a folder of its own."""

    def archive(cifar):
        folder, official = write(cifar), SETS[cifar]
        path = tmp_path / "packed" / official.filename
        path.parent.mkdir()
        with tarfile.open(path, "w:gz") as tar:
            tar.add(folder, official.base_folder)
        monkeypatch.setattr(official, "tgz_md5", md5(path))
        return path

    return archive


@pytest.fixture
def serve(monkeypatch):
    """Serves the folder of an archive as the official address; the paths that were asked for."""
    with ExitStack() as servers:

        def serve(cifar, path):
            address, asked = servers.enter_context(served(path.parent))
            monkeypatch.setattr(SETS[cifar], "url", f"{address}/{path.name}")
            return asked

        yield serve


def loaded(data):
    data.setup()
    return data


def equal(a, b):
    return torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)


def fails(data, *words):
    """The one line that loading says."""
    with pytest.raises(UserError) as caught:
        data.load()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    return message


# --- what is read ----------------------------------------------------------------------------------------------------


def test_the_batches_of_these_tests_are_pickled_as_python_2_did():
    batch = {"data": np.arange(6, dtype=np.uint8).reshape(2, 3), "labels": [0, 300], "batch_label": "a"}
    assert pickletools.optimize(Python2.dumps(batch)) == pickletools.optimize(REAL_PYTHON2)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("cifar", SETS)
def test_torchvision_reads_the_same(write, cifar, writer, capfd):
    folder = write(cifar, WRITERS[writer])
    ours = loaded(cifar(str(folder), batch_size=4))
    for part, train in ((ours.train, True), (ours.test, False)):
        theirs = SETS[cifar](folder.parent, train=train)
        assert part.images.dtype == torch.uint8
        assert torch.equal(part.images, torch.from_numpy(theirs.data).permute(0, 3, 1, 2))
        assert part.labels.dtype == torch.int64
        assert part.labels.tolist() == theirs.targets
        assert list(ours.class_names) == theirs.classes
    assert len(ours.train) == (25 if cifar is CIFAR10 else 5)
    assert (ours.image_size, ours.channels) == (32, 3)
    assert capfd.readouterr().err == ""


def test_coarse_labels(write):
    folder = write(CIFAR100)
    fine, coarse = (loaded(CIFAR100(str(folder), labels=labels, batch_size=4)) for labels in ("fine", "coarse"))
    assert torch.equal(fine.train.images, coarse.train.images)
    assert coarse.train.labels.tolist() == contents(CIFAR100)["train"]["coarse_labels"]
    assert fine.train.labels.tolist() == contents(CIFAR100)["train"]["fine_labels"]
    assert coarse.class_names == tuple(f"coarse_labels {i}" for i in range(20))
    assert (fine.name, coarse.name, CIFAR10().name) == ("cifar100", "cifar100-coarse", "cifar10")


@pytest.mark.parametrize("cifar", SETS)
def test_folder_archive_and_what_holds_them_are_the_same(archive, tmp_path, cifar, capfd):
    packed = archive(cifar)
    reference = loaded(cifar(str(tmp_path / "data" / SETS[cifar].base_folder), batch_size=4))
    for path in (tmp_path / "data", packed, packed.parent):
        other = loaded(cifar(str(path), batch_size=4))
        assert equal(other.train, reference.train)
        assert equal(other.test, reference.test)
        assert other.class_names == reference.class_names
    assert [path.name for path in packed.parent.iterdir()] == [packed.name]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_arrays_of_any_layout(write, protocol):
    labels, data = np.array(TRAIN["fine_labels"], dtype=">i8"), np.asfortranarray(TRAIN["data"])
    folder = write(CIFAR100, train=pickle.dumps({**TRAIN, "fine_labels": labels, "data": data}, protocol))
    train = loaded(CIFAR100(str(folder), batch_size=4)).train
    assert train.labels.tolist() == TRAIN["fine_labels"]
    assert (train.images.numpy() == TRAIN["data"].reshape(5, 3, 32, 32)).all()


def test_other_files_than_the_official_ones_are_read_with_one_warning(write, capfd):
    folder = write(CIFAR10)
    for name in ("data_batch_2", "test_batch"):
        (folder / name).write_bytes(Python2.dumps(contents(CIFAR10)["data_batch_1"]))
    data = loaded(CIFAR10(str(folder), batch_size=4))
    assert torch.equal(data.train.images[5:10], data.train.images[:5])
    (warning,) = capfd.readouterr().err.splitlines()
    assert "not the official" in warning
    assert [name for name in os.listdir(folder) if str(folder / name) in warning] == ["data_batch_2", "test_batch"]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("download", [False, True])
def test_nothing_there(tmp_path, serve, download):
    asked = serve(CIFAR100, tmp_path / "cifar-100-python.tar.gz")
    url = datasets.CIFAR100.url
    mend = "its download failed" if download else "--data.download true"
    for path in (tmp_path, tmp_path / "missing"):
        found = CIFAR100(str(path), download)
        fails(found, str(path), "cifar-100-python", "cifar-100-python.tar.gz", url, mend)
    fails(CIFAR100(str(tmp_path / "x.tar.gz"), download), f"{tmp_path}/x.tar.gz: looked for an archive", url, mend)
    assert asked == []
    assert list(tmp_path.iterdir()) == []


def test_missing_files_are_named(write):
    folder = write(CIFAR10)
    (folder / "data_batch_4").unlink()
    (folder / "batches.meta").unlink()
    for path in (folder, folder.parent):
        fails(CIFAR10(str(path)), str(folder), "data_batch_4, batches.meta")


def test_another_archive_is_refused_with_both_checksums(archive):
    packed = archive(CIFAR100)
    packed.write_bytes(packed.read_bytes()[:-100])
    for path in (packed, packed.parent):
        fails(CIFAR100(str(path)), str(packed), md5(packed), datasets.CIFAR100.tgz_md5)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (WHOLE[: len(WHOLE) // 2], "truncated"),
        (b"", "damaged"),
        (b"not a pickle", "damaged"),
        (WHOLE.replace(b"U\x02u1", b"U\x02O8"), "damaged"),
        (WHOLE.replace(b"U\x02u1", b"U\x02u2"), "damaged"),
        ([1, 2], "has no data and no fine_labels, only [1, 2]"),
        ({key: TRAIN[key] for key in ("data", "coarse_labels")}, "no fine_labels, only ['data', 'coarse_labels']"),
        ({**TRAIN, "data": TRAIN["data"][:, 1:]}, "uint8 (n, 3072), it is uint8 (5, 3071)"),
        ({**TRAIN, "data": TRAIN["data"].astype(np.float32)}, "it is float32 (5, 3072)"),
        ({**TRAIN, "fine_labels": [0, 1, 2, 3]}, "5 images but fine_labels are int64 (4,)"),
        ({**TRAIN, "fine_labels": [0, 1, 2, 3, 100]}, "0 to 100, but the meta file names 100 classes"),
        ({**TRAIN, "fine_labels": [0, 1, 2, 3, -1]}, "-1 to 3"),
        ({**TRAIN, "fine_labels": [0, 1, 2, 3, [4]]}, "not a CIFAR batch"),
        ({**TRAIN, "fine_labels": np.zeros(5)}, "fine_labels are float64 (5,)"),
    ],
)
def test_what_is_no_cifar_batch(write, train, words):
    folder = write(CIFAR100, WRITERS["protocol2"], train=train)
    fails(CIFAR100(str(folder)), f"{folder}/train", words)


@pytest.mark.parametrize("names", [[], "apple", [1, 2]])
def test_what_are_no_class_names(write, names):
    folder = write(CIFAR100, WRITERS["protocol2"], meta={"fine_label_names": names})
    fails(CIFAR100(str(folder)), f"{folder}/meta: fine_label_names is not a list of class names")
    fails(CIFAR100(str(folder), labels="coarse"), "no coarse_label_names, only ['fine_label_names']")


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("function", [os.system, eval, np.load, np.fromfile])
def test_a_pickle_that_runs_code_is_refused_and_not_run(write, tmp_path, function, protocol):
    marker = tmp_path / "marker"
    argument = {os.system: f"touch {marker}", eval: f"open({str(marker)!r}, 'w')"}.get(function, str(marker))
    hostile = pickle.dumps({**TRAIN, "extra": Runs(function, argument)}, protocol)
    if function in (os.system, eval):  # the pickle does what it says
        pickle.loads(hostile)
        marker.unlink()
    folder = write(CIFAR100, train=hostile)
    fails(CIFAR100(str(folder)), f"{folder}/train is a pickle that wants to run", f"{function.__name__}: refused")
    assert not marker.exists()


# --- downloads and training ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["", "mine.tar.gz"])
def test_a_download_goes_where_the_path_says_and_is_not_repeated(archive, serve, tmp_path, place):
    packed = archive(CIFAR100)
    asked = serve(CIFAR100, packed)
    path = tmp_path / "new" / place
    CIFAR100(str(path)).prepare_data()  # downloads are asked for
    assert not path.exists()
    for _ in range(2):
        data = CIFAR100(str(path), download=True, batch_size=4)
        data.prepare_data()
        assert equal(loaded(data).train, loaded(CIFAR100(str(packed), batch_size=4)).train)
    assert asked == ["/cifar-100-python.tar.gz"]
    assert (tmp_path / "new" / (place or packed.name)).read_bytes() == packed.read_bytes()


def test_what_is_there_is_not_downloaded(write, serve, tmp_path):
    folder = write(CIFAR10)
    asked = serve(CIFAR10, tmp_path / "cifar-10-python.tar.gz")
    CIFAR10(str(folder.parent), download=True).prepare_data()
    assert asked == []


def test_a_failed_download_says_where_the_file_goes(tmp_path, serve):
    serve(CIFAR10, tmp_path / "served" / "nothing.tar.gz")
    data = CIFAR10(str(tmp_path / "data"), download=True)
    data.prepare_data()  # must not raise: of several processes the others would wait for this one
    with pytest.raises(UserError, match="404") as caught:
        data.load()
    assert datasets.CIFAR10.url in str(caught.value)
    assert f"put it at {tmp_path}/data/cifar-10-python.tar.gz" in str(caught.value)
