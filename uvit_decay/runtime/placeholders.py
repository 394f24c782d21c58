"""Files that stand in place of the file that was asked for: a Git LFS pointer, or the web page of a failed download."""

from __future__ import annotations

import re
from pathlib import Path

from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import check_is_file

PAGE = 256  # bytes at the start of a file that reveal a placeholder
# First line of a pointer, by git-lfs' docs/spec.md: the current URL, and the URL of the first versions.
POINTERS = (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/")
WEB_PAGE = re.compile(rb"\s*<[!?a-zA-Z]")  # the length at the start of a .safetensors can have the bytes of " <"


def check_content(name: Path | str, start: bytes) -> None:
    """Raise a UserError if a binary file that begins with the bytes `start` is a placeholder.

    Args:
        name: path of the file, for the message.
        start: the first `PAGE` bytes, or more.
    """
    if start.startswith(POINTERS):
        raise UserError(f"{name} is a Git LFS pointer, not the file itself: run git lfs pull in its repository")
    if WEB_PAGE.match(start):
        raise UserError(f"{name} is a web page, not the file itself: the download failed, fetch it again")


def check_file(path: Path) -> None:
    """Raise a UserError if a file is a placeholder or no regular file; an OSError if it cannot be read."""
    check_is_file(path)
    with path.open("rb") as file:
        check_content(path, file.read(PAGE))
