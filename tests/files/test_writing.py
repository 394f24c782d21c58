"""Files: found impossible to write before the work, one program at a time, and replaced whole or not at all."""

import subprocess
import sys

import pytest
import torch
from refusals import check_refusal, find_line, raises_user_error

from uvit_decay.files.writing import check_writable, claim_paths, replacing
from uvit_decay.terminal.errors import UserError


@pytest.mark.parametrize(("name", "folder"), [("out.png", False), ("a/b/out.png", False), ("a/b/out", True)])
def test_a_check_makes_missing_folders_and_leaves_nothing_else_behind(tmp_path, name, folder):
    path = tmp_path / name
    for _ in range(2):
        check_writable(path, folder=folder)
    parents = {p for p in [path, *path.parents] if tmp_path in p.parents}
    assert set(tmp_path.rglob("*")) == (parents if folder else parents - {path})


@pytest.mark.parametrize(
    ("name", "folder", "reason"),
    [
        ("file/deep/out.png", False, "Not a directory"),
        ("file", True, "exists"),
        ("folder", False, "folder"),
        ("x" * 300 + ".png", False, "File name too long"),
    ],
)
def test_a_path_that_cannot_be_written_is_a_user_error_and_leaves_nothing_behind(tmp_path, name, folder, reason):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with raises_user_error(tmp_path / name, reason):
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
    with raises_user_error("model", "Invalid argument"), replacing(path) as file:
        file.seek(-1)  # fails half-way
    assert path.read_bytes() == b"new"


def test_a_replaced_file_may_be_read_by_whoever_the_umask_lets(tmp_path):
    (tmp_path / "usual").touch()
    with replacing(tmp_path / "model") as file:
        file.write(b"x")
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError, torch.OutOfMemoryError])
def test_whatever_stops_the_writing_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "model"
    path.write_bytes(b"old")

    def write():
        with replacing(path) as file:
            file.write(b"new")
            raise error("stop")

    with pytest.raises(error, match="stop"):
        write()
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == b"old"


CLAIM = """
import sys
from pathlib import Path
from uvit_decay.files.writing import claim_paths
from uvit_decay.terminal.errors import user_errors
with user_errors(), claim_paths(Path(sys.argv[1])):
    print("claimed", flush=True)
    sys.stdin.read()
"""


def claim(path):
    """Return a program that writes `path` until its input ends."""
    command = [sys.executable, "-c", CLAIM, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("folder", [False, True])
def test_a_second_program_is_refused_what_another_one_is_writing(tmp_path, folder):
    path = tmp_path / "out"
    if folder:
        path.mkdir()
    with claim(path) as first:
        assert first.stdout.readline() == "claimed\n"
        with claim(path) as second:
            assert second.wait(60) == 2
            find_line(check_refusal(second.stderr.read()), "another program", path)
        first.kill()
    with claim(path) as third:  # a kill leaves the lock's file, but no lock
        assert third.stdout.readline() == "claimed\n"
        third.communicate("")
    assert {*tmp_path.rglob("*")} == ({path} if folder else set())


def test_what_a_kill_left_of_a_file_is_removed_by_the_next_program_and_nothing_else(tmp_path):
    left, others = tmp_path / ".out[1].npz.01234567.partial", [".out[1].npz2.01234567.partial", "out[1].npz", ".out"]
    for path in (left, *(tmp_path / name for name in others)):
        path.touch()
    with claim_paths(tmp_path / "out[1].npz"):
        assert not left.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_several_files_are_claimed_together_or_not_at_all(tmp_path):
    first, second = tmp_path / "report.json", tmp_path / "report.html"
    with claim_paths(second), raises_user_error("report.html"), claim_paths(first, second):
        pass
    with claim_paths(first, second), raises_user_error("report.html"), claim_paths(second):
        pass
    assert not [*tmp_path.iterdir()]
