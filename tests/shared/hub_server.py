"""A stand-in for the Hugging Face Hub over HTTP on this machine: what huggingface_hub calls to upload and download."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants, file_download

TOKEN = "hf_of_the_tests"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server has received.

    Args:
        files: bytes by (repository, revision, name).
        repositories: body of the request that made each of them.
        messages: of the commits.
        refuse: status with which requests that change something are refused; None for none.
    """

    url: str = ""
    files: dict[tuple[str, str, str], bytes] = field(default_factory=dict)
    repositories: dict[str, dict] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    large: dict[str, bytes] = field(default_factory=dict)
    refuse: int | None = None

    def of(self, repository: str, revision: str = "main") -> dict[str, bytes]:
        """The files of a repository by name."""
        return {name: data for (one, other, name), data in self.files.items() if (one, other) == (repository, revision)}


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid username or password."}, 401)
        if self.hub.refuse is not None:
            return self.answer({"error": "refused"}, self.hub.refuse)
        path = self.path.partition("?")[0].strip("/")
        words = path.removeprefix("api/models/").split("/")
        repository = "/".join(words[:2])
        if path == "api/repos/create":
            return self.create(json.loads(body))
        if path == "api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.batch(json.loads(body))
        if repository not in self.hub.repositories:
            return self.answer({"error": "Repository not found"}, 404)
        if words[2] == "branch":
            return self.answer({})
        if words[2] == "preupload":
            modes = {True: "lfs", False: "regular"}
            names = [file["path"] for file in json.loads(body)["files"]]
            large = [{"path": name, "uploadMode": modes[name.endswith(".safetensors")]} for name in names]
            return self.answer({"files": [{**file, "shouldIgnore": False} for file in large]})
        return self.commit(repository, words[3], [json.loads(line) for line in body.splitlines()])

    def create(self, about: dict) -> None:
        name = f"{about['organization']}/{about['name']}"
        known = name in self.hub.repositories
        self.hub.repositories.setdefault(name, about)
        self.answer({"url": f"{self.hub.url}/{name}"}, 409 if known else 200)

    def batch(self, about: dict) -> None:
        """Tell where to put large files."""
        put = [{**one, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}} for one in about["objects"]]
        self.answer({"transfer": "basic", "objects": put})

    def commit(self, repository: str, revision: str, lines: list[dict]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.hub.messages.append(value["summary"])
            elif line["key"] == "lfsFile":
                self.hub.files[repository, revision, value["path"]] = self.hub.large[value["oid"]]
            else:
                assert (line["key"], value["encoding"]) == ("file", "base64")
                self.hub.files[repository, revision, value["path"]] = base64.b64decode(value["content"])
        self.answer({"commitUrl": f"{self.hub.url}/{repository}/commit/{COMMIT}", "commitOid": COMMIT})

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(data).hexdigest() == oid
        self.hub.large[oid] = data
        self.answer({})

    def do_HEAD(self) -> None:
        self.download(body=False)

    def do_GET(self) -> None:
        if not self.path.startswith("/api/models/"):
            return self.download(body=True)
        words = self.path.partition("?")[0].split("/")[3:]
        repository = "/".join(words[:2])
        files = self.hub.of(repository)
        if words[2:3] == ["tree"]:
            oids = {name: hashlib.sha1(data).hexdigest() for name, data in files.items()}
            return self.answer([{"type": "file", "path": n, "size": len(files[n]), "oid": oids[n]} for n in files])
        # huggingface_hub before 1.0 asks before an upload; diffusers before a download
        named = [{"rfilename": name} for name in files]
        return self.answer({"id": repository, "sha": COMMIT, "xetEnabled": False, "siblings": named})

    def download(self, body: bool) -> None:
        user, _, rest = self.path.partition("?")[0].strip("/").partition("/")
        name, _, rest = rest.partition("/resolve/")
        revision, _, file = rest.partition("/")
        revision = "main" if revision == COMMIT else revision
        data = self.hub.files.get((f"{user}/{name}", revision, file))
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
def hub(monkeypatch, tmp_path):
    """The stand-in, and huggingface_hub as HF_ENDPOINT, HF_TOKEN and HF_HUB_DISABLE_XET=1 would set it."""
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        address = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", address, raising=False)  # before 1.0
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # which processes of the whole suite inherit as True
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
