"""A local stand-in for the Hugging Face Hub, with the routes that huggingface_hub needs for downloads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from cifar_files import run_server
from huggingface_hub import constants, file_download, hf_api

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def oid(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


class Handler(SimpleHTTPRequestHandler):
    """Serves the files in `directory` for every repository name."""

    def do_GET(self) -> None:
        if not self.path.startswith("/api/models/"):
            return super().do_GET()
        root = Path(self.directory)
        files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
        if "/tree/" in self.path:
            sizes = {name: path.stat().st_size for name, path in files.items()}
            content = [{"type": "file", "path": name, "size": sizes[name], "oid": oid(files[name])} for name in files]
        else:
            siblings = [{"rfilename": name} for name in files]
            content = {"id": "me/repository", "sha": COMMIT, "xetEnabled": False, "siblings": siblings}
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return self.wfile.write(body)

    def translate_path(self, path: str) -> str:
        """Return the file of /owner/name/resolve/revision/file."""
        return super().translate_path(path.partition("/resolve/")[2].partition("/")[2])

    def end_headers(self) -> None:
        path = Path(self.translate_path(self.path))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header(*("ETag", f'"{oid(path)}"') if path.is_file() else ("X-Error-Code", "EntryNotFound"))
        super().end_headers()


@contextmanager
def hub(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every repository be this folder; huggingface_hub is as HF_ENDPOINT and HF_HUB_DISABLE_XET=1 would set it."""
    with run_server(folder, Handler) as (url, _):
        address = url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "ENDPOINT", url)
        patch.setattr(hf_api.api, "endpoint", url)  # of the functions that diffusers calls
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        patch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", address, raising=False)  # before 1.0
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)  # which processes of the whole suite inherit as True
        yield
