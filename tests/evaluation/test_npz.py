"""Arrays of damaged .npz files: one line each."""

import io
import json
import os
import zipfile

import numpy as np
import pytest
from refusals import raises_user_error

from uvit_decay.encoders import SmallClassifier
from uvit_decay.evaluation.image_sources import ArrayImages
from uvit_decay.evaluation.statistics_file import StatisticsFile
from uvit_decay.terminal.errors import UserError

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(256, size=(6, 8, 8, 3), dtype=np.uint8)
COV = np.cov(RANDOM.normal(size=(64, 200)))
STATISTICS = {"mu": np.zeros(64), "sigma": COV, "about": np.array(json.dumps({"n": 200}))}


class Classifier(SmallClassifier):
    def fingerprint(self):
        return "small-cnn-0"


def read_images(path):
    source = ArrayImages(path, 3)
    return [source.read(range(len(source))).numpy(), source.labels.numpy()]


def read_statistics(path):
    source = StatisticsFile(path)
    source.check(Classifier())
    return [*(value.numpy() for value in source.statistics("features")[:2]), np.array(source.metadata["n"])]


READ = {"images": read_images, "statistics": read_statistics}
ARRAYS = {"images": {"arr_0": IMAGES, "arr_1": np.arange(6)}, "statistics": STATISTICS}


@pytest.mark.parametrize("kind", READ)
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path, kind):
    os.mkfifo(tmp_path / "a.npz")
    with raises_user_error("a.npz", "regular file"):
        READ[kind](tmp_path / "a.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("kind", READ)
def test_flipped_bits_are_noticed_or_change_nothing(tmp_path, kind, save):
    path = tmp_path / "a.npz"
    save(path, **ARRAYS[kind])
    expected, content, noticed, lines = READ[kind](path), path.read_bytes(), 0, set()
    for place in range(0, len(content), max(len(content) // 150, 1)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            actual = READ[kind](path)
        except UserError as error:
            actual, noticed = expected, noticed + 1
            lines.add(str(error))
        assert all(map(np.array_equal, actual, expected)), place
    assert noticed > 75
    assert all("a.npz" in line and "\n" not in line for line in lines)


def header(**values):
    """Return the bytes of an array that says this of itself."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "|u1", "fortran_order": False, "shape": (6, 8, 8, 3), **values}
    )
    return file.getvalue()


def packed(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)


@pytest.mark.parametrize(
    ("shape", "descr"),
    [
        ((10**9, 64, 64, 3), "|u1"),
        ((-6, -8, 8, 3), "|u1"),
        ((6, 8, 8, 3), "|O"),
        ((144,), "<f8"),
    ],
)
def test_headers_that_do_not_fit_are_refused(tmp_path, shape, descr):
    packed(tmp_path / "a.npz", arr_0=header(shape=shape, descr=descr) + IMAGES.tobytes())
    with raises_user_error("a.npz"):
        ArrayImages(tmp_path / "a.npz", 3)


@pytest.mark.parametrize(
    "labels", [np.full(6, 10**9), np.full(6, -1), np.full(6, 2**63, np.uint64), np.zeros(6), np.zeros(5, int)]
)
def test_labels_that_can_be_none_are_refused_at_once(tmp_path, labels):
    np.savez(tmp_path / "a.npz", arr_0=IMAGES, arr_1=labels)
    with raises_user_error("arr_1"):
        ArrayImages(tmp_path / "a.npz", 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sigma": COV + np.triu(COV, 1)}, "not symmetric"),
        ({"sigma": -COV}, "negative"),
        ({"mu": np.full(64, 1e300)}, "float32"),
        ({"mu": np.full(64, np.inf)}, "NaN"),
        ({"mu": np.zeros(63)}, ("mu (63,)", "sigma (64, 64)", "small-cnn")),
        ({"mu": np.zeros((64, 1))}, ("mu", "float64 (64, 1)")),
        ({"sigma": COV.astype(complex)}, "sigma must be"),
        ({"mu": np.array(["x"] * 64)}, "mu must be"),
        ({"about": np.array("[1]")}, "about must be dict"),
        ({"about": np.array("[" * 10**5)}, "about"),
        ({"about": np.array('{"extractor": 3}')}, (3, "small-cnn-0")),
        ({"about": np.array(None)}, "read"),
    ],
)
def test_statistics_that_cannot_be_any_are_one_line(tmp_path, change, message):
    np.savez(tmp_path / "a.npz", **{**STATISTICS, **change})
    with raises_user_error(message) as raised:
        read_statistics(tmp_path / "a.npz")
    assert "a.npz" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("claimed", [32, 100])
def test_arrays_unlike_their_header_are_refused(tmp_path, claimed):
    packed(tmp_path / "a.npz", mu=header(descr="<f8", shape=(claimed,)) + bytes(64 * 8))
    with raises_user_error("a.npz"):
        StatisticsFile(tmp_path / "a.npz")


def test_an_array_written_to_a_pipe_is_read(tmp_path):
    """Such an archive has the size of the array after its bytes."""

    class Pipe(io.BytesIO):
        def tell(self):
            raise OSError("not seekable")

    np.savez(pipe := Pipe(), **ARRAYS["images"])
    (tmp_path / "a.npz").write_bytes(pipe.getvalue())
    assert np.array_equal(read_images(tmp_path / "a.npz")[1], np.arange(6))
