"""Plain values of files: the types that they should be."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pytest
from refusals import raises_user_error

from uvit_decay.files.validation import as_type, read_json, read_yaml


@dataclass(frozen=True)
class Inner:
    scale: float


@dataclass(frozen=True)
class Outer:
    inner: Inner
    kind: Literal["a", "b"]
    rows: Sequence[Sequence[float]] | None = None
    sizes: dict[str, int] | None = None


RIGHT = {"inner": {"scale": 1}, "kind": "a", "rows": [[1, 2.5]], "sizes": {"x": 3}}


def test_values_become_what_they_are():
    found = as_type(Outer, RIGHT, "it")
    assert found == Outer(Inner(1.0), "a", ((1.0, 2.5),), {"x": 3})
    assert type(found.inner.scale) is float
    assert as_type(Outer, {"inner": {"scale": 0.5}, "kind": "b"}, "it") == Outer(Inner(0.5), "b")
    for value in (1, "a", None):
        assert as_type(int | str | None, value, "it") == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": 3}, ("it", "inner", "dict", "'3'")),
        ({"inner": {}}, "it: inner lacks scale"),
        ({"inner": {"scale": True}}, "it: inner: scale must be float, got 'True'"),
        ({"inner": {"scale": float("nan")}}, "it: inner: scale must be float, got 'nan'"),
        ({"inner": {"scale": 10**400}}, "it: inner: scale must be float"),
        ({"inner": {"scale": 1, "shift": 2}}, ("it", "inner", "shift")),
        ({"kind": "c"}, ("it", "kind", "'c'")),
        ({"rows": [[1], [None]]}, ("it", "rows[1][0]", "float")),
        ({"sizes": {"x": 1.0}}, "it: sizes: x must be int"),
        ({"sizes": {3: 1}}, "it: sizes must be str"),
    ],
)
def test_other_values_are_one_line_that_names_the_field(change, message):
    with raises_user_error(message):
        as_type(Outer, RIGHT | change, "it")


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (read_yaml, "a: !!python/object/apply:os.system [true]"),
        (read_yaml, "[1, 2]"),
        (read_yaml, "a: " + "x" * 2**20),
        (partial(read_json, kind=object), "[" * 10**6),
        (partial(read_json, kind=object), "1" * 5000),
        (partial(read_json, kind=object), b"\xff\xfe"),
    ],
)
def test_what_is_damaged_or_another_file_is_one_line(tmp_path, read, content):
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with raises_user_error(path):
        read(path)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("pipe", "file"), (".", "file"), ("nowhere", "exist")):
        with raises_user_error(tmp_path / name, message):
            read_yaml(tmp_path / name)
