"""Tiny CIFAR sets, used instead of the official ones."""

import hashlib
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from torchvision import datasets

from uvit_decay.data import CIFAR10, CIFAR100

SETS = {CIFAR10: datasets.CIFAR10, CIFAR100: datasets.CIFAR100}
LABELS = {"labels": "label_names", "fine_labels": "fine_label_names", "coarse_labels": "coarse_label_names"}
CLASSES = {"labels": 10, "fine_labels": 100, "coarse_labels": 20}


def contents(cifar) -> dict[str, dict]:
    """Return the dicts of a tiny set by file name: five noise images per batch, and labels that reach both ends."""
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
def run_server(folder: Path, handler: type = SimpleHTTPRequestHandler) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a server of the files in a folder, and the list of requested paths."""
    asked: list[str] = []

    class Handler(handler):
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


def write_cifar(cifar, folder: Path, patch: pytest.MonkeyPatch, **changes: bytes) -> Path:
    """Write a tiny set, extracted, to `folder` and let its files count as the official ones, apart from `changes`."""
    official = SETS[cifar]
    target = folder / official.base_folder
    target.mkdir()
    for name, content in contents(cifar).items():
        (target / name).write_bytes(pickle.dumps(content, 2))
    for part in ("train_list", "test_list"):
        patch.setattr(official, part, [[name, md5(target / name)] for name, _ in getattr(official, part)])
    meta = official.meta["filename"]
    patch.setattr(official, "meta", {**official.meta, "md5": md5(target / meta)})
    for name, content in changes.items():
        (target / name).write_bytes(content)
    return target
