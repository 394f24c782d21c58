"""A file comes whole, once and right, over connections that break."""

import hashlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from refusals import raises_user_error

from uvit_decay.files.download import download, verify

CONTENT = np.random.default_rng(0).bytes(1_000_001)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `content`; `requests` counts the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.content = 0, CONTENT
        self.length = True  # says how long its answer is
        self.encoding = None  # says that the file, a .tar.gz, is an encoding of another one
        self.cut = len(CONTENT)  # bytes of an answer after which the connection ends
        self.status = None  # answers this error
        self.delay = 0.0  # seconds before it answers
        self.url = f"http://127.0.0.1:{self.server_port}/file.bin"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        server.requests += 1
        time.sleep(server.delay)
        if server.status:
            return self.send_error(server.status)
        self.send_response(200)
        if server.length:
            self.send_header("Content-Length", str(len(CONTENT)))
        if server.encoding:
            self.send_header("Content-Encoding", server.encoding)
        self.end_headers()
        return self.wfile.write(server.content[: server.cut])

    def log_message(self, *_) -> None:
        pass


@contextmanager
def serving(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def server():
    with serving(Server()) as server:
        yield server


@pytest.fixture
def target(tmp_path):
    return tmp_path / "new" / "file.bin"


def fails(*words, url, target, **options):
    """Check that a download fails with a line that has these words."""
    with raises_user_error(*words):
        download(url, target, SHA256, **options)


def arrived(target):
    left = {path.name for path in target.parent.iterdir()}
    return target.read_bytes() == CONTENT and left == {target.name, f"{target.name}.lock"}


@pytest.mark.parametrize(("length", "encoding"), [(True, None), (False, "gzip")])
def test_a_file_is_fetched_once(server, target, length, encoding, capfd):
    server.length, server.encoding = length, encoding
    download(server.url, target, SHA256)
    assert arrived(target)
    assert "file.bin" in capfd.readouterr().err
    beside = target.with_name("beside")
    beside.touch()
    assert target.stat().st_mode == beside.stat().st_mode  # others can read it if the user's files are for others
    download(server.url, target, SHA256)
    assert server.requests == 1


def test_a_cut_connection_leaves_nothing_and_the_next_call_fetches_all(server, target):
    server.cut = 400_000
    fails(server.url, str(target), SHA256, url=server.url, target=target)
    server.status = 503
    fails(server.url, "503", target, url=server.url, target=target)
    assert [path.name for path in target.parent.iterdir()] == ["file.bin.lock"]
    server.cut = server.status = None
    for left in ("01234567", "fetched", "fetched.partial.0123456789abcdef"):  # by killed programs
        target.with_name(f".file.bin.{left}.partial").touch()
    download(server.url, target, SHA256)
    assert arrived(target)


def test_wrong_bytes_are_removed_and_both_checksums_named(server, target):
    server.content = b"x" + CONTENT[1:]
    fails(server.url, SHA256, hashlib.sha256(server.content).hexdigest(), url=server.url, target=target)
    assert [path.name for path in target.parent.iterdir()] == ["file.bin.lock"]
    server.content = CONTENT
    download(server.url, target, SHA256)
    assert arrived(target)


def test_the_start_of_a_checksum_is_enough(server, target):
    download(server.url, target, SHA256[:8])
    assert arrived(target)
    with raises_user_error(SHA256):
        verify(target, "0" * 8)


def test_another_file_in_its_place_is_named_and_kept(server, target):
    target.parent.mkdir()
    target.write_bytes(b"something of the user's")
    found = hashlib.sha256(target.read_bytes()).hexdigest()
    fails(str(target), SHA256, found, "23 bytes", url=server.url, target=target)
    assert target.read_bytes() == b"something of the user's"
    assert server.requests == 0


def test_a_silent_server_does_not_hold_on_for_ever(target):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/file.bin"
        start = time.monotonic()
        fails(url, "timed out", url=url, target=target, timeout=0.1)
    assert time.monotonic() - start < 5


def test_a_place_that_cannot_be_written_is_found_before_the_network(server, tmp_path):
    (tmp_path / "file").touch()
    fails(str(tmp_path / "file"), url=server.url, target=tmp_path / "file" / "file.bin")
    assert server.requests == 0


def test_those_who_want_the_same_file_at_once_fetch_it_once(server, target):
    server.delay = 0.2
    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(download, server.url, target, SHA256) for _ in range(3)]:
            future.result()
    assert server.requests == 1
    assert arrived(target)
