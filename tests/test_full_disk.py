"""Every writer of the package on a full disk: one line, the old file intact, nothing else left behind."""

from __future__ import annotations

import re
import resource
import shutil
from contextlib import contextmanager

import pytest
import torch
from conftest import ROOT
from refusals import check_refusal, find_line, raises_user_error

from uvit_decay.callbacks.last_checkpoint import AtomicCheckpointIO
from uvit_decay.checkpoint.convert import export_file
from uvit_decay.evaluation.feature_store import FeatureStore
from uvit_decay.evaluation.report_html import Report, write_html
from uvit_decay.files.tensor_files import save_tensors
from uvit_decay.pictures import labelled_grid, save_image, save_npz
from uvit_decay.terminal.errors import user_errors

PICTURES = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
WEIGHTS = {"weight": torch.zeros(5000)}


@contextmanager
def full_disk(limit):
    """No file can grow beyond `limit` bytes, as on a full disk: Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def report():
    return Report("title", {"fid": 1.0}, {}, (), PICTURES, 2, (), None, None)


def store(path):
    found = FeatureStore(path.parent, {}, [range(2)])
    found.add(range(2), {"features": torch.zeros(2, 2048)})


WRITERS = {
    "grid.png": lambda path: save_image(path, labelled_grid(PICTURES, 2)),
    "samples.npz": lambda path: save_npz(path, [PICTURES], 2),
    "last.ckpt": lambda path: AtomicCheckpointIO().save_checkpoint(WEIGHTS, path),
    "report.html": lambda path: write_html(path, report()),
    "shard-0.safetensors": lambda path: save_tensors(path, WEIGHTS),
    "000000000.safetensors": store,
    "model.pth": lambda path: export_file(ROOT / "checkpoints" / "digits.safetensors", path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_a_line_and_leaves_the_old_file_and_nothing_else(tmp_path, name):
    path = tmp_path / name
    (tmp_path / "whole").mkdir()
    WRITERS[name](tmp_path / "whole" / name)  # also reads what is read only once
    limit = (tmp_path / "whole" / name).stat().st_size // 2
    shutil.rmtree(tmp_path / "whole")
    path.write_bytes(b"old")
    with raises_user_error(path, "File too large"), full_disk(limit):
        WRITERS[name](path)
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == b"old"


def test_what_others_write_on_a_full_disk_is_a_line_too(tmp_path, capsys):
    def write():
        with user_errors(), full_disk(0):
            (tmp_path / "file").write_text("x")

    with pytest.raises(SystemExit) as stop:
        write()
    assert stop.value.code == 2
    find_line(check_refusal(capsys.readouterr().err), "File too large")
    with pytest.raises(FileNotFoundError), user_errors():  # another fault than the disk's
        (tmp_path / "gone").read_bytes()


@pytest.mark.slow
def test_a_training_on_a_full_disk_ends_with_a_line_and_nothing_half_written(training, tmp_path):
    program = training.start(tmp_path, before=["tests/shared/surroundings.py", "small-files=100000"])
    assert program.wait() == 2, program.stderr
    assert re.fullmatch("error: cannot write .*: File too large", program.last_line)
    assert "Traceback" not in program.stderr
    assert not [*tmp_path.rglob("*.ckpt"), *tmp_path.rglob("*.partial")]
