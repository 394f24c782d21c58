"""A Git LFS pointer or a web page in place of any file that is opened is called so."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import raises_user_error
from safetensors.torch import save_file

from uvit_decay.checkpoint import load
from uvit_decay.data.decoding import open_image
from uvit_decay.data.listing import list_images
from uvit_decay.evaluation import npz
from uvit_decay.files.download import verify
from uvit_decay.files.tensor_files import load_pickle, load_tensors
from uvit_decay.files.validation import read_json
from uvit_decay.files.writing import check_content

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 12345\n" % (b"4d7a" * 16)
FIRST_POINTER = POINTER.replace(b"git-lfs.github.com", b"hawser.github.com")
PAGES = (b"\n<!DOCTYPE html><html></html>", b"<html>", b"<?xml version='1.0'?><Error/>")


def open_picture(path: Path) -> None:
    with open_image(BytesIO(path.read_bytes()), path.name):
        pass


READERS = {
    "last.ckpt": load,
    "official.pt": load_pickle,
    "model.safetensors": load_tensors,
    "picture.png": open_picture,
    "images.zip": list_images,
    "images.tar": list_images,
    "statistics.npz": npz.names,
    "config.json": lambda path: read_json(path, object),
    "inception.pth": lambda path: verify(path, "00000000"),
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_names_a_placeholder(tmp_path, name):
    path = tmp_path / name
    for content, fragments in ((POINTER, ("LFS", "git lfs pull")), (PAGES[0], "web page")):
        path.write_bytes(content)
        with raises_user_error(name, fragments):
            READERS[name](path)


@pytest.mark.parametrize("content", [FIRST_POINTER, *PAGES])
def test_placeholders_are_recognised(content):
    with raises_user_error("a.pt"):
        check_content("a.pt", content)


def test_other_contents_are_accepted(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(2))
    assert npz.names(tmp_path / "a.npz") == ["x"]
    path = tmp_path / "a.safetensors"
    fill = 0
    while not path.exists() or path.read_bytes()[:2] != b" <":  # a header of 0x3c20 bytes
        save_file({"x": torch.zeros(1)}, path, {"fill": "x" * fill})
        fill = 15392 - int.from_bytes(path.read_bytes()[:8], "little") + fill
    assert load_tensors(path)[1]["x"].tolist() == [0.0]
