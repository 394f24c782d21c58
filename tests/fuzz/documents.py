"""Texts (JSON, YAML, CSV) that somebody edited, and contents that would run a program."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from random import Random
from typing import Any

import yaml
from bytewise import Mutation

CANARY = "canary"  # what hostile contents would leave in the working folder
COMMANDS = (("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "exec"), ("subprocess", "Popen"))
COMMANDS += (("subprocess", "check_output"), ("builtins", "open"), ("pathlib", "Path.touch"), ("shutil", "rmtree"))
VALUES = (None, True, -1, 0, 1, 2**63, 10**30, 1e308, float("nan"), float("inf"), "", "x", "\n", "\0", "é\u202e")
VALUES += ("../../outside", "x" * 10_000, [], {}, [[]], {"": None}, [None] * 100, "!!python/name:os.system")


def lines(data: bytes, random: Random) -> bytes:
    """Leave out, repeat, swap or join lines."""
    rows = data.splitlines(keepends=True) or [b""]
    i, j = random.randrange(len(rows)), random.randrange(len(rows))
    change = random.randrange(5)
    if change == 0:
        rows.pop(i)
    elif change == 1:
        rows.insert(j, rows[i])
    elif change == 2:
        rows[i], rows[j] = rows[j], rows[i]
    elif change == 3:
        rows[i] = rows[i].strip() + b" "
    else:
        rows[i] = b"    " + rows[i]
    return b"".join(rows)


def edited(data: bytes, random: Random) -> bytes:
    """Change words of a text: numbers, letters, signs, its encoding."""
    text = data.decode(errors="replace")
    place = random.randrange(len(text) + 1)
    sign = random.choice(
        ("\n", "\0", "\t", "\u2028", "é", "\ud7ff", "\ufeff", '"', "'", "{", "]", ":", ",", "#", "-", "9" * 5000)
    )
    return random.choice(
        (
            lambda: (text[:place] + sign + text[place:]).encode(),
            lambda: text.encode("utf-16"),
            lambda: data + b"\xff\xfe",
            lambda: b"\xef\xbb\xbf" + data,
            lambda: text.replace("0", "9", 1).encode(),
            lambda: text.replace(":", "", 1).encode(),
            lambda: data.replace(b"\n", b"\r\n"),
        )
    )()


def _places(value: Any, place: tuple = ()) -> list[tuple]:
    """Return the paths of all values inside a tree."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [inner for key, item in items for inner in ((*place, key), *_places(item, (*place, key)))]


def changed_tree(tree: Any, random: Random, value: Any = None) -> Any:
    """Return the tree with one value replaced, taken out, renamed or put in another's place."""
    places = _places(tree)
    if not places:
        return random.choice(VALUES)
    *way, last = random.choice(places)
    inner = tree
    for key in way:
        inner = inner[key]
    change = random.randrange(5)
    if value is not None or change < 3:
        old = inner[last]
        near = (old + 1, -old, old * 2) if type(old) in (int, float) else ()
        inner[last] = random.choice((*VALUES, *near, *near)) if value is None else value
    elif change == 3 and isinstance(inner, dict):
        inner[random.choice(("", "é\n", "class_path", "version", str(last).upper()))] = inner.pop(last)
    else:
        inner.pop(last)
    return tree


def json_value(data: bytes, random: Random) -> bytes:
    """Change a value of a JSON document, or of one of its lines."""
    rows = [data]
    try:
        json.loads(data)
    except ValueError:  # a line is a document
        rows = data.splitlines()
    i = random.randrange(len(rows))
    rows[i] = json.dumps(changed_tree(json.loads(rows[i]), random), indent=2 if len(rows) == 1 else None).encode()
    return b"\n".join(rows) + b"\n"


def yaml_value(data: bytes, random: Random) -> bytes:
    return yaml.safe_dump(changed_tree(yaml.safe_load(data), random), allow_unicode=True).encode()


def yaml_program(data: bytes, random: Random) -> bytes:
    """Name something that runs, as a tag of Python or as a class."""
    module, name = random.choice(COMMANDS)
    kind = random.randrange(3)
    if kind == 0:
        call = random.choice(("object/apply:", "object/new:", "name:", "object:"))
        text = f"!!python/{call}{module}.{name} ['touch {CANARY}']\n".encode()
        return random.choice((data + b"more: " + text, text, data.replace(b": ", b": " + text.strip() + b"\n", 1)))
    init_args = random.choice(
        ({"command": f"touch {CANARY}"}, {"args": ["touch", CANARY]}, {"source": f"open('{CANARY}', 'w')"})
    )
    value = {"class_path": f"{module}.{name}", "init_args": init_args}
    return yaml.safe_dump(
        changed_tree(yaml.safe_load(data), random, value if kind == 1 else f"{module}.{name}")
    ).encode()


TEXT: tuple[Mutation, ...] = (lines, edited)
JSON: tuple[Mutation, ...] = (json_value, json_value, edited, lines)
YAML: tuple[Mutation, ...] = (yaml_value, yaml_value, yaml_program, yaml_program, edited, lines)


def evil_pickle(data: bytes, random: Random) -> bytes:
    """Return a pickle that runs a program, by the opcodes of the first or of later protocols."""
    module, name = random.choice(COMMANDS)
    argument = f"open('{CANARY}', 'w')" if name in ("eval", "exec") else f"touch {CANARY}"
    named = f"c{module}\n{name}\n".encode()
    text = b"X" + struct.pack("<I", len(argument)) + argument.encode()
    short = b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93"
    calls = (
        named + b"(" + text + b"tR",
        b"\x80\x04" + short + text + b"\x85R",
    )
    call = random.choice(calls)
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
