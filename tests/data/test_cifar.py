"""CIFAR as the official batches hold it: torchvision reads the same, and other files are refused unread."""

import tarfile
from contextlib import ExitStack

import pytest
import torch
from cifar_files import SETS, contents, md5, run_server, write_cifar
from refusals import find_line, raises_user_error
from torchvision import datasets

from uvit_decay.data import CIFAR10, CIFAR100


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a set of tiny files into <tmp_path>/data and declares them the official ones; the extracted folder."""
    (tmp_path / "data").mkdir()
    return lambda cifar, **changes: write_cifar(cifar, tmp_path / "data", monkeypatch, **changes)


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
            address, asked = servers.enter_context(run_server(path.parent))
            monkeypatch.setattr(SETS[cifar], "url", f"{address}/{path.name}")
            return asked

        yield serve


def loaded(data):
    data.setup()
    return data


def equal(a, b):
    return torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)


def fails(data, *words):
    with raises_user_error(*words):
        data.load()


@pytest.mark.parametrize("cifar", SETS)
def test_torchvision_reads_the_same(write, cifar):
    folder = write(cifar)
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


def test_coarse_labels(write):
    folder = write(CIFAR100)
    fine, coarse = (loaded(CIFAR100(str(folder), labels=labels, batch_size=4)) for labels in ("fine", "coarse"))
    assert torch.equal(fine.train.images, coarse.train.images)
    assert coarse.train.labels.tolist() == contents(CIFAR100)["train"]["coarse_labels"]
    assert coarse.class_names == tuple(f"coarse_labels {i}" for i in range(20))
    assert (fine.find_sizes(), coarse.find_sizes()) == ((32, 3, 100), (32, 3, 20))
    assert (fine.name, coarse.name, CIFAR10().name) == ("cifar100", "cifar100-coarse", "cifar10")


@pytest.mark.parametrize("cifar", SETS)
def test_folder_archive_and_what_holds_them_are_the_same(archive, tmp_path, cifar):
    packed = archive(cifar)
    reference = loaded(cifar(str(tmp_path / "data" / SETS[cifar].base_folder), batch_size=4))
    for path in (tmp_path / "data", packed, packed.parent):
        other = loaded(cifar(str(path), batch_size=4))
        assert equal(other.train, reference.train)
        assert equal(other.test, reference.test)
        assert other.class_names == reference.class_names
    assert [path.name for path in packed.parent.iterdir()] == [packed.name]


def test_nothing_there(tmp_path):
    fails(CIFAR100(str(tmp_path)), tmp_path, "cifar-100-python.tar.gz", datasets.CIFAR100.url, "--data.download true")


def test_a_missing_file_and_another_archive_are_refused(write, archive):
    folder = write(CIFAR10)
    (folder / "data_batch_4").unlink()
    for path in (folder, folder.parent):
        fails(CIFAR10(str(path)), folder, "cifar-10-python.tar.gz")
    (folder / "data_batch_4").write_bytes(b"a pickle that could run code")
    fails(CIFAR10(str(folder)), folder, "cifar-10-python.tar.gz")
    packed = archive(CIFAR100)
    packed.write_bytes(packed.read_bytes()[:-100])
    for path in (packed, packed.parent):
        fails(CIFAR100(str(path)), str(packed), md5(packed), datasets.CIFAR100.tgz_md5)


def test_a_lone_archive_is_read_where_nothing_can_be_written(archive):
    packed = archive(CIFAR10)
    packed.parent.chmod(0o500)
    try:
        assert len(loaded(CIFAR10(str(packed.parent), batch_size=4)).train) == 25
    finally:
        packed.parent.chmod(0o700)


@pytest.mark.parametrize("name", ["new", "cifar-100-python", "cifar-100-python.tar.gz"])
def test_a_download_is_unpacked_and_not_repeated(archive, serve, tmp_path, name):
    packed = archive(CIFAR100)
    asked = serve(CIFAR100, packed)
    path = tmp_path / name
    CIFAR100(str(path)).prepare_data()  # downloads are asked for
    assert not path.exists()
    for _ in range(2):
        data = CIFAR100(str(path), download=True, batch_size=4)
        data.prepare_data()
        assert equal(loaded(data).train, loaded(CIFAR100(str(packed), batch_size=4)).train)
    assert set(asked) == {"/cifar-100-python.tar.gz"}
    assert (path / packed.name).read_bytes() == packed.read_bytes()


def test_what_is_there_is_not_downloaded(write, serve, tmp_path):
    folder = write(CIFAR10)
    asked = serve(CIFAR10, tmp_path / "cifar-10-python.tar.gz")
    CIFAR10(str(folder.parent), download=True).prepare_data()
    assert asked == []


def test_a_failed_download_ends_all_processes_where_they_load(tmp_path, serve, capsys):
    """Only one process of a node downloads: an error there would leave the others waiting."""
    serve(CIFAR10, tmp_path / "served" / "nothing.tar.gz")
    data = CIFAR10(str(tmp_path / "data"), download=True)
    data.prepare_data()
    find_line(capsys.readouterr().err, "404", datasets.CIFAR10.url)
    fails(data, datasets.CIFAR10.url, tmp_path / "data")
