"""Plain values of files: the types that they should be, and no tree without end."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
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
        ({"inner": {"scale": "1"}}, "it: inner: scale must be float"),
        ({"inner": {"scale": float("nan")}}, "it: inner: scale must be float, got 'nan'"),
        ({"inner": {"scale": 10**400}}, "it: inner: scale must be float"),
        ({"inner": {"scale": 1, "shift": 2}}, ("it", "inner", "shift")),
        ({"kind": "c"}, ("it", "kind", "'c'")),
        ({"kind": ["a"]}, ("it", "kind")),
        ({"rows": "12"}, "it: rows must be"),
        ({"rows": [[1], [None]]}, ("it", "rows[1][0]", "float")),
        ({"sizes": {"x": 1.0}}, "it: sizes: x must be int"),
        ({"sizes": {3: 1}}, "it: sizes must be str"),
    ],
)
def test_other_values_are_one_line_that_names_the_field(change, message):
    with raises_user_error(message) as raised:
        as_type(Outer, RIGHT | change, "it")
    assert "\n" not in str(raised.value)


EXPONENTIAL = "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))])


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (read_yaml, "a: &a {b: [*a]}"),
        (read_yaml, EXPONENTIAL),
        (read_yaml, "[" * 5000),
        (read_yaml, "a: 2026-99-99"),
        (read_yaml, "a: !!python/object/apply:os.system [true]"),
        (read_yaml, "[1, 2]"),
        (read_yaml, "a: " + "x" * 2**20),
        (lambda path: read_json(path, object), "[" * 500 + "]" * 500),
        (lambda path: read_json(path, object), "[" * 10**6),
        (lambda path: read_json(path, object), "[" + "1," * 10**6 + "1]"),
        (lambda path: read_json(path, object), "1" * 5000),
        (lambda path: read_json(path, object), ""),
    ],
)
def test_what_has_no_end_or_is_damaged_is_one_line_at_once(tmp_path, read, content):
    path = tmp_path / "file"
    path.write_text(content)
    with raises_user_error(path):
        read(path)


def test_what_is_no_file_is_not_waited_for(tmp_path):

    os.mkfifo(tmp_path / "pipe")
    for name, message in (("pipe", "file"), (".", "file"), ("nowhere", "exist")):
        with raises_user_error(tmp_path / name, message):
            read_yaml(tmp_path / name)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with raises_user_error("bytes"):
        read_json(tmp_path / "bytes", object)


def test_aliases_that_end_are_followed(tmp_path):
    (tmp_path / "a.yaml").write_text("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}")
    assert read_yaml(tmp_path / "a.yaml") == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}
