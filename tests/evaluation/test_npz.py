"""Arrays of damaged .npz files, and of other things than images and statistics: one line each."""

import json
import os

import numpy as np
import pytest
from refusals import raises_user_error

from uvit_decay.encoders import SmallClassifier
from uvit_decay.evaluation.image_sources import ArrayImages
from uvit_decay.evaluation.statistics_file import StatisticsFile

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(256, size=(6, 8, 8, 3), dtype=np.uint8)
COV = np.cov(RANDOM.normal(size=(64, 200)))
ARRAYS = {
    "images": {"arr_0": IMAGES, "arr_1": np.arange(6)},
    "statistics": {"mu": np.zeros(64), "sigma": COV, "about": np.array(json.dumps({"n": 200}))},
}


class Classifier(SmallClassifier):
    def fingerprint(self):
        return "small-cnn-0"


def read(path, kind):
    if kind == "images":
        ArrayImages(path, 3)
    else:
        StatisticsFile(path).check(Classifier())


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("kind", ARRAYS)
def test_a_flipped_bit_and_a_pipe_are_refused(tmp_path, kind, save):
    path = tmp_path / "a.npz"
    save(path, **ARRAYS[kind])
    read(path, kind)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with raises_user_error("a.npz"):
        read(path, kind)
    os.mkfifo(tmp_path / "pipe.npz")
    with raises_user_error("pipe.npz", "regular file"):
        read(tmp_path / "pipe.npz", kind)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("images", {"arr_0": np.array([None])}, "Object arrays"),
        ("images", {"arr_1": np.zeros(6)}, "arr_1"),
        ("images", {"arr_1": np.zeros(5, int)}, "arr_1"),
        ("images", {"arr_1": np.arange(6) - 1}, ("arr_1", -1)),
        ("images", {"arr_1": np.arange(6) * 2**40}, ("arr_1", 2**40)),
        ("statistics", {"mu": np.full(64, np.inf)}, "NaN"),
        ("statistics", {"mu": np.zeros(63)}, ("mu (63,)", "sigma (64, 64)", "small-cnn")),
        ("statistics", {"mu": np.zeros((64, 1))}, ("mu", "float64 (64, 1)")),
        ("statistics", {"sigma": COV.astype(complex)}, "sigma must be"),
        ("statistics", {"about": np.array("[1]")}, "about must be dict"),
        ("statistics", {"about": np.array('{"extractor": 3}')}, (3, "small-cnn-0")),
    ],
)
def test_other_arrays_are_one_line(tmp_path, kind, change, message):
    np.savez(tmp_path / "a.npz", **{**ARRAYS[kind], **change})
    with raises_user_error("a.npz", message):
        read(tmp_path / "a.npz", kind)
