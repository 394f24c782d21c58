"""SHA-256 of the files that settings of a run name, so that a resumed run notices a file that has changed."""

from __future__ import annotations

import os
from pathlib import Path

from uvit_decay.checkpoint.io import weights_file
from uvit_decay.files.download import checksum
from uvit_decay.files.writing import at_home
from uvit_decay.generation.options import TIMM
from uvit_decay.runs.settings import DECIDES, SHA256, Settings, find_effect
from uvit_decay.terminal.errors import explain
from uvit_decay.terminal.program import find_bundled


def digest_files(settings: Settings) -> dict[str, str]:
    """Return the SHA-256 of each file that shapes training, as NAME.sha256 for the setting NAME that names the file.

    These are the files in the settings of the model, such as the teacher of REPA or a file of a class from elsewhere.
    Images have a fingerprint of their own. The weights of timm:NAME, without a FILE, are not compared.

    Args:
        settings: settings of the run by flag.
    """
    found = {}
    for name, value in settings.items():
        if not name.startswith("model.") or find_effect(name) != DECIDES:
            continue
        digests = []
        for text in value if isinstance(value, list) else [value]:
            file = _find_file(text) if isinstance(text, str) else None
            if file is not None:
                with explain(f"cannot read {file}", OSError):
                    digests.append(checksum(file))
        if digests:
            found[name + SHA256] = " ".join(digests)
    return found


def _find_file(text: str) -> Path | None:
    """Return the file that a text names, for an exported folder the file of its weights; None if it names no file."""
    name = text.partition("=")[2] if text.startswith(TIMM) else text
    path = at_home(name)
    if os.path.isdir(path):  # unlike Path.is_dir, False for a text that is too long for a path
        path = weights_file(path)
    elif not os.path.isfile(path):
        path = find_bundled(name)
    return path if os.path.isfile(path) else None
