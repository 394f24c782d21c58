"""Pickles that would run a program, in files whose checksums are right."""

from __future__ import annotations

import io
import struct
import zipfile
from random import Random

from bytewise import Mutation

CANARY = "canary"  # what hostile contents would leave in the working folder
COMMANDS = (("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "exec"), ("subprocess", "Popen"))
COMMANDS += (("subprocess", "check_output"), ("builtins", "open"), ("pathlib", "Path.touch"), ("shutil", "rmtree"))


def evil_pickle(data: bytes, random: Random) -> bytes:
    """Return a pickle that runs a program, by the opcodes of the first or of later protocols."""
    module, name = random.choice(COMMANDS)
    argument = f"open('{CANARY}', 'w')" if name in ("eval", "exec") else f"touch {CANARY}"
    named = f"c{module}\n{name}\n".encode()
    text = b"X" + struct.pack("<I", len(argument)) + argument.encode()
    short = b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93"
    call = random.choice((named + b"(" + text + b"tR", b"\x80\x04" + short + text + b"\x85R"))
    body = data[2:] if data[:1] == b"\x80" else data
    return random.choice((call + b".", call + b"0" + body, data[:2] + call + b"0" + body))


def zip_pickle(data: bytes, random: Random) -> bytes:
    """Let the pickle of a file of torch.save, or an array, run a program; all checksums are right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    target = next((name for name, _ in members if name.endswith("data.pkl")), members[0][0])
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members:
            archive.writestr(name, evil_pickle(content, random) if name == target else content)
    return file.getvalue()


TORCH: tuple[Mutation, ...] = (zip_pickle,)
