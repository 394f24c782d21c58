"""Tiny CIFAR sets for the tests, and the pickles that Python 2 and 3 make of them."""

import hashlib
import io
import pickle
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from torchvision import datasets

from uvit_decay.data import CIFAR10, CIFAR100

SETS = {CIFAR10: datasets.CIFAR10, CIFAR100: datasets.CIFAR100}
LABELS = {"labels": "label_names", "fine_labels": "fine_label_names", "coarse_labels": "coarse_label_names"}
CLASSES = {"labels": 10, "fine_labels": 100, "coarse_labels": 20}


# cPickle.dumps({"data": numpy.arange(6, dtype="u1").reshape(2, 3), "labels": [0, 300], "batch_label": "a"}, 2)
# of Python 2.7.18 with numpy 1.16.6.
REAL_PYTHON2 = (
    b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
    b"\x87Rq\x05(K\x01K\x02K\x03\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xff"
    b"J\xff\xff\xff\xffK\x00tb\x89U\x06\x00\x01\x02\x03\x04\x05tbU\x06labelsq\x08]q\t(K\x00M,\x01e"
    b"U\x0bbatch_labelq\nU\x01au."
)


class Python2(pickle._Pickler):
    """What cPickle of Python 2 wrote in protocol 2: bytes and text as str (opcodes U and T), names of numpy 1."""

    dispatch = dict(pickle._Pickler.dispatch)

    @classmethod
    def dumps(cls, value) -> bytes:
        file = io.BytesIO()
        cls(file, protocol=2).dump(value)
        return file.getvalue()

    def save_str(self, value) -> None:
        raw = value.encode("latin1") if isinstance(value, str) else value
        self.write(b"U" + bytes([len(raw)]) if len(raw) < 256 else b"T" + struct.pack("<i", len(raw)))
        self.write(raw)
        self.memoize(value)

    dispatch[bytes] = dispatch[str] = save_str

    def save_global(self, value, name=None) -> None:
        self.write(f"c{value.__module__.replace('_core', 'core')}\n{value.__name__}\n".encode())
        self.memoize(value)

    def reducer_override(self, value):
        if isinstance(value, np.dtype):
            return np.dtype, (value.str[1:], 0, 1), (3, value.str[0], None, None, None, -1, -1, 0)
        return NotImplemented


class Runs:
    """Its pickle calls a function when it is read."""

    def __init__(self, function, *args) -> None:
        self.call = function, args

    def __reduce__(self):
        return self.call


WRITERS = {
    "python2": Python2.dumps,
    "protocol2": partial(pickle.dumps, protocol=2),
    "protocol4": partial(pickle.dumps, protocol=4),
    "protocol5": partial(pickle.dumps, protocol=5),
}


def contents(cifar) -> dict[str, dict]:
    """The dicts of a tiny set by file name: five images in each batch, noise under labels that reach both ends."""
    official, rng, files = SETS[cifar], np.random.default_rng(0), {}
    keys = ["labels"] if cifar is CIFAR10 else ["fine_labels", "coarse_labels"]
    for name, _ in official.train_list + official.test_list:
        files[name] = {"batch_label": f"a {name}", "data": rng.integers(0, 256, (5, 3072), dtype=np.uint8)}
        for key in keys:
            last = CLASSES[key] - 1
            files[name][key] = [0, last, *rng.integers(0, last, 3).tolist()]
    names = {LABELS[key]: [f"{key} {i}" for i in range(CLASSES[key])] for key in keys}
    return {**files, official.meta["filename"]: names}


def md5(path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a server of the files in a folder, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, *_) -> None:
            asked.append(self.path)

        def log_error(self, *_) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def write_cifar(cifar, folder: Path, dumps=Python2.dumps, **changes: dict | bytes) -> Path:
    """The extracted folder of a tiny set in `folder`, with other contents for the files that are named."""
    target = folder / SETS[cifar].base_folder
    target.mkdir()
    for name, content in {**contents(cifar), **changes}.items():
        (target / name).write_bytes(content if isinstance(content, bytes) else dumps(content))
    return target
