"""Files: found impossible to write before the work, and replaced whole or not at all."""

import re

import pytest

from uvit_decay.disk import check_writable, replacing
from uvit_decay.errors import UserError


@pytest.mark.parametrize(("name", "folder"), [("out.png", False), ("a/b/out.png", False), ("a/b/out", True)])
def test_a_check_makes_missing_folders_and_leaves_nothing_else_behind(tmp_path, name, folder):
    path = tmp_path / name
    for _ in range(2):
        check_writable(path, folder=folder)
    parents = {p for p in [path, *path.parents] if tmp_path in p.parents}
    assert set(tmp_path.rglob("*")) == (parents if folder else parents - {path})


def test_a_check_leaves_an_existing_file_as_it_is(tmp_path):
    path = tmp_path / "out.png"
    path.write_bytes(b"precious")
    check_writable(path)
    assert path.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "folder", "reason"),
    [
        ("file/out.png", False, "File exists|Not a directory"),
        ("file/deep/out.png", False, "Not a directory"),
        ("file", True, "File exists"),
        ("file/out", True, "Not a directory"),
        ("folder", False, "it is a folder"),
        ("x" * 300 + ".png", False, "File name too long"),
    ],
)
def test_a_path_that_cannot_be_written_is_a_user_error_and_leaves_nothing_behind(tmp_path, name, folder, reason):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=rf"^cannot write {re.escape(str(tmp_path / name))}: ({reason})$"):
        check_writable(tmp_path / name, folder=folder)
    assert set(tmp_path.rglob("*")) == {tmp_path / "file", tmp_path / "folder"}
    assert (tmp_path / "file").read_bytes() == b""


def test_a_file_is_replaced_when_it_is_complete_and_not_before(tmp_path):
    path = tmp_path / "model"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    with pytest.raises(UserError, match="cannot write .*model: Invalid argument"), replacing(path) as file:
        file.seek(-1)  # fails half-way
    assert path.read_bytes() == b"new"


def test_a_replaced_file_may_be_read_by_whoever_the_umask_lets(tmp_path):
    (tmp_path / "usual").touch()
    with replacing(tmp_path / "model") as file:
        file.write(b"x")
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "usual").stat().st_mode
