"""Upload of an exported folder to the Hugging Face Hub: python -m uvit_decay.checkpoint push FOLDER USER/NAME."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub.constants import CONFIG_NAME, SAFETENSORS_SINGLE_FILE
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from uvit_decay.checkpoint.folders import INDEX
from uvit_decay.runtime.errors import UserError, explained

EXPORTS = ((INDEX,), (CONFIG_NAME, SAFETENSORS_SINGLE_FILE))  # files of a pipeline, of a network alone
IGNORED = [".*", "*/.*", "__pycache__/*", "*/__pycache__/*"]
README = "README.md"
DENIED = {
    401: "the Hub refused the token: make one with write access, then hf auth login",
    403: "the token may not write there: it needs write access, and the name must be yours or your organisation's",
    404: "the Hub has no such repository, or hides it from this token",
}


def push(
    folder: Path, repository: str, private: bool = False, dry_run: bool = False, revision: str | None = None
) -> str:
    """Upload an exported folder to USER/NAME of the Hub in one commit, and return what was uploaded and its address.

    Args:
        folder: one of a pipeline or of a network alone.
        repository: its name; it is made if it is not there.
        private: whether a new one is private.
        dry_run: return a list of what would be uploaded instead.
        revision: branch, made if it is not there; default: main.

    Raises:
        UserError: another folder, no token, no network, or no permission.
    """
    files = uploaded(folder)
    with explained(f"{repository!r} is no name of a repository, such as USER/NAME", ValueError):
        validate_repo_id(repository)
    if "/" not in repository:
        raise UserError(f"{repository!r} has no owner: give USER/{repository} or ORGANISATION/{repository}")
    if remark := _unlicensed(folder):
        print(f"remark: {remark}", file=sys.stderr)
    total = f"{len(files)} files, {sum(files.values()) / 2**20:.1f} MiB"
    if dry_run:
        lines = [f"{size:>14,}  {name}" for name, size in files.items()]
        return "\n".join([*lines, f"{total}, would be uploaded to {repository}"])
    if get_token() is None:
        raise UserError("there is no token for the Hub: hf auth login stores one, or set HF_TOKEN")
    return f"uploaded {total}: {_upload(folder, repository, private, revision)}"


def uploaded(folder: Path) -> dict[str, int]:
    """Return the files of an exported folder by name, with their sizes in bytes; raise a UserError for another one."""
    if not folder.is_dir():
        raise UserError(f"{folder} {'is no folder' if folder.exists() else 'is not there'}")
    if not any(all((folder / name).is_file() for name in names) for names in EXPORTS):
        raise UserError(f"{folder} is no exported folder: export CKPT {folder} --to diffusers writes one")
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name: (folder / name).stat().st_size for name in filter_repo_objects(names, ignore_patterns=IGNORED)}


def _unlicensed(folder: Path) -> str | None:
    """Return a remark if the README.md of the folder names no licence."""
    if not (folder / README).is_file():
        return f"there is no {README}, which the Hub shows"
    with explained(f"the head of {folder / README} is no YAML", Exception):
        license = ModelCard.load(folder / README).data.license
    unknown = license in (None, "unknown")
    return f"{README} names no licence of the weights: edit it, or export with --license" if unknown else None


def _upload(folder: Path, repository: str, private: bool, revision: str | None) -> str:
    """Return the address of the commit."""
    api = HfApi()
    with _denied(repository):
        made = api.create_repo(repository, private=private or None, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(made, branch=revision, exist_ok=True)
        message = f"Upload {folder.resolve().name}"
        commit = api.upload_folder(
            repo_id=made, folder_path=folder, revision=revision, commit_message=message, ignore_patterns=IGNORED
        )
    return commit.commit_url


@contextmanager
def _denied(repository: str) -> Iterator[None]:
    """Turn errors of the Hub and of the network into a UserError of one line."""
    with explained(f"cannot upload to {repository}", HTTPError, OSError, ValueError):
        try:
            yield
        except HfHubHTTPError as error:
            reason = DENIED.get(error.response.status_code)
            if reason is None:
                raise
            raise UserError(f"cannot upload to {repository}: {reason}") from error
