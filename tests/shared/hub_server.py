"""A stand-in for the Hugging Face Hub over HTTP on this machine: what huggingface_hub calls to download."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants, file_download

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Repositories: bytes by their names and the names of files."""

    url: str = ""
    files: dict[tuple[str, str], bytes] = field(default_factory=dict)

    def add(self, repository: str, folder: Path) -> None:
        """Take the files of a folder."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.files[repository, path.relative_to(folder).as_posix()] = path.read_bytes()


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.download(body=False)

    def do_GET(self) -> None:
        if not self.path.startswith("/api/models/"):
            return self.download(body=True)
        words = self.path.partition("?")[0].split("/")[3:]
        repository = "/".join(words[:2])
        files = {name: data for (owner, name), data in self.hub.files.items() if owner == repository}
        if words[2:3] == ["tree"]:
            oids = {name: hashlib.sha1(data).hexdigest() for name, data in files.items()}
            return self.answer([{"type": "file", "path": n, "size": len(files[n]), "oid": oids[n]} for n in files])
        named = [{"rfilename": name} for name in files]
        return self.answer({"id": repository, "sha": COMMIT, "xetEnabled": False, "siblings": named})

    def download(self, body: bool) -> None:
        user, _, rest = self.path.partition("?")[0].strip("/").partition("/")
        name, _, rest = rest.partition("/resolve/")
        data = self.hub.files.get((f"{user}/{name}", rest.partition("/")[2]))
        if data is None:
            self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        self.send(data if body else b"", 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "size": str(len(data))})

    def answer(self, content: dict | list, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send(json.dumps(content).encode(), status, {"Content-Type": "application/json"} | (headers or {}))

    def send(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, **headers}.items():
            if name != "size":
                self.send_header(name, value)
        self.send_header("Content-Length", headers.get("size", str(len(data))))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        """Print nothing."""


@contextmanager
def serving() -> Hub:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OneHub", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(monkeypatch):
    """The stand-in, and huggingface_hub as HF_ENDPOINT and HF_HUB_DISABLE_XET=1 would set it."""
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        address = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", address, raising=False)  # before 1.0
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # which processes of the whole suite inherit as True
        yield server
