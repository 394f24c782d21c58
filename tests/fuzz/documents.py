"""Mutations of texts (JSON, YAML, CSV, class lists) and pickles that know their grammar."""

from __future__ import annotations

import json
import pickle
import struct
from random import Random
from typing import Any

import yaml
from bytewise import Mutation

CANARY = "canary"  # what hostile contents would leave in the working folder
COMMANDS = (("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "exec"), ("subprocess", "Popen"))
COMMANDS += (("subprocess", "check_output"), ("builtins", "open"), ("pathlib", "Path.touch"), ("shutil", "rmtree"))
VALUES = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**30,
    -(2**63),
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\n",
    "\0",
    "é\u202e",
)
VALUES += (
    "../../outside",
    "/etc/passwd",
    "x" * 10_000,
    [],
    {},
    [[]],
    {"": None},
    [None] * 100,
    "!!python/name:os.system",
)
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(f'*{a}' for _ in range(9))}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


# ---- texts


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


def nested(data: bytes, random: Random) -> bytes:
    """Nest deeper than parsers recurse."""
    sign = random.choice((b"[", b'{"a":', b"- ", b"(", b"? "))
    place = random.choice((0, len(data), random.randint(0, len(data))))
    return data[:place] + sign * random.choice((60, 5_000, 100_000)) + data[place:]


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


def json_twice(data: bytes, random: Random) -> bytes:
    """Repeat a key with another value."""
    start = data.index(b"{") + 1
    key = json.dumps(random.choice(list(json.loads(data.splitlines()[0] if data[1:2] != b"\n" else data)))).encode()
    value = json.dumps(random.choice(VALUES)).encode()
    end = data.rindex(b"}")
    repeated = key + b": " + value
    return random.choice((data[:start] + repeated + b", " + data[start:], data[:end] + b", " + repeated + data[end:]))


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


def yaml_alias(data: bytes, random: Random) -> bytes:
    """Add aliases that grow without end, that hold themselves, or that are not there."""
    return random.choice(
        (BOMB.encode() + data, data + BOMB.encode(), b"x: &x [*x]\n" + data, data + b"y: *gone\n", b"<<: *x\n" + data)
    )


TEXT: tuple[Mutation, ...] = (lines, lines, edited, edited, nested)
JSON: tuple[Mutation, ...] = (json_value, json_value, json_value, json_twice, edited, lines, nested)
YAML: tuple[Mutation, ...] = (
    yaml_value,
    yaml_value,
    yaml_value,
    yaml_program,
    yaml_program,
    yaml_alias,
    edited,
    lines,
    nested,
)


# ---- pickles


def evil_pickle(data: bytes, random: Random) -> bytes:
    """Return a pickle that runs a program, in one of the ways in which pickles can."""
    module, name = random.choice(COMMANDS)
    argument = f"open('{CANARY}', 'w')" if name in ("eval", "exec") else f"touch {CANARY}"
    named = f"c{module}\n{name}\n".encode()
    text = b"X" + struct.pack("<I", len(argument)) + argument.encode()
    short = b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93"
    calls = (
        named + b"(" + text + b"tR",
        b"\x80\x04" + short + text + b"\x85R",
        b"(" + text + f"i{module}\n{name}\n".encode(),
        b"(" + named + text + b"o",
        b"\x80\x02" + named + text + b"\x85\x81",
        named + b"(" + text + b"tR" + b"}(X\x01\0\0\0aK\x01ub",
    )
    call = random.choice(calls)
    body = data[2:] if data[:1] == b"\x80" else data
    return random.choice((call + b".", call + b"0" + body, data[:2] + call + b"0" + body))


def pickle_number(data: bytes, random: Random) -> bytes:
    """Put in an opcode with a huge number: a memo's index, a length, a long."""
    opcode = random.choice(
        (
            b"K\x01r\xff\xff\xff\x0f0",
            b"K\x01p99999999\n0",
            b"\x8e" + b"\xff" * 7 + b"\x7f",
            b"\x8a\xff",
            b"\x8b\xff\xff\xff\x7f",
            b"L" + b"9" * 100_000 + b"L\n0",
            b"T\xff\xff\xff\x7f",
            b"\x95" + b"\xff" * 7 + b"\x7f",
            b"(" * 100_000,
            b"]" + b"\x940h\x00" * 3,
        )
    )
    return data[:2] + opcode + data[2:]


def pickle_value(data: bytes, random: Random) -> bytes:
    """Return a pickle of other plain values."""
    grown: list[Any] = ["x"]
    for _ in range(30):
        grown = [grown, grown]
    inside: dict[str, Any] = {}
    inside["data"] = inside
    values = (*VALUES, grown, inside, {"data": b"", "labels": []}, {"data": grown, "labels": grown})
    return pickle.dumps(random.choice(values), random.choice((0, 2, 4)))


PICKLE: tuple[Mutation, ...] = (evil_pickle, evil_pickle, pickle_number, pickle_value)
