"""A disk of a chosen size, which can become full or read-only: a tmpfs, where the rights allow one."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from programs import Program
from refusals import check_refusal

PAGE = 4096  # bytes; a tmpfs gives whole pages to files
PLENTY = 10_000  # pages


class Disk:
    """An empty disk mounted at `folder`; skips the test if mounting needs more rights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], capture_output=True)
        if made.returncode:
            pytest.skip("needs the right to mount a tmpfs")
        (folder / "some").write_bytes(b"x")

    def leave(self, pages: int) -> None:
        """Make the disk writable, with space for this number of pages."""
        state = os.statvfs(self.folder)
        size = (state.f_blocks - state.f_bfree + pages) * PAGE
        self._remount(f"rw,size={size}")

    def forbid(self) -> None:
        """Make the disk read-only."""
        self._remount("ro")

    def end(self) -> None:
        """Unmount the disk; its files are lost."""
        subprocess.run(["umount", "--lazy", self.folder], check=True)

    def _remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", self.folder], check=True)


def check_line(program: Program, reason: str) -> None:
    """Check that a program has ended with one line that names the file it could not write, and the reason."""
    assert program.wait() == 2, program.stderr
    line = check_refusal(program.stderr)
    assert re.search(rf"{reason}|GiB", line), line  # what latents need is known before the first image is encoded
    assert "partial" not in program.last_line
