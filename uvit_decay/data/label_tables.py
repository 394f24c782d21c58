"""Tables of labels: dataset.json of EDM and StyleGAN, metadata of Hugging Face's imagefolder, csv, tsv and text.

A table has names of images and their labels; names are relative to the folder of the table.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from uvit_decay.data.classes import split_parts
from uvit_decay.runtime.errors import UserError, explain

DATASET = "dataset.json"
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
FILE_NAME = "file_name"  # the column of names in metadata
NAME_COLUMNS = (FILE_NAME, "filename", "file", "filepath", "file_path", "path", "image", "image_name", "image_id")
NAME_COLUMNS += ("image_path", "img_path", "img_name", "fname", "filenames", "img", "name", "id")
LABEL_WORDS = {"label", "labels", "class", "category", "target"}  # a column of labels has one, such as fine_label


class NoLabels(UserError):
    """A file that may have labels has none, such as metadata with captions."""


@dataclass(frozen=True)
class Table:
    """Labels by the names of images.

    Args:
        where: the file, for messages.
        labels: int or text by name, or any other value that the file has in its place.
    """

    where: str
    labels: dict[str, Any]


def read_table(where: str, data: bytes, column: str | None, flag: str) -> Table:
    """Return the labels in the contents of a file.

    Args:
        where: the file, for messages; its extension tells the format.
        data: its contents.
        column: the column of labels; None takes the only one.
        flag: the option that names the column.

    Raises:
        NoLabels: the file is whole, but has no names of images or no labels.
        UserError: the file is damaged, or has several columns of labels.
    """
    name = where.rpartition("/")[2].lower()
    if name.endswith(".parquet"):
        columns, rows = _parse_parquet(where, data)
        return _collect(where, _choose_entries(where, columns, rows, column, flag))
    with explain(f"cannot read {where}", UnicodeDecodeError):
        text = data.decode("utf-8-sig")  # with or without the byte order mark of Windows
    if name.endswith(".json"):
        return _collect(where, _parse_dataset(where, text))
    if name.endswith((".jsonl", ".ndjson")):
        columns, rows = _parse_lines(where, text)
        return _collect(where, _choose_entries(where, columns, rows, column, flag))
    return _collect(where, _parse_text(where, text, column, flag, metadata=name in METADATA))


def _choose_entries(
    where: str, columns: list[str], rows: list[dict[str, Any]], column: str | None, flag: str
) -> list[tuple[Any, Any]]:
    """Return the names and labels of rows with a column of names, `FILE_NAME`."""
    label = _choose_column(where, columns, FILE_NAME, column, flag)
    return [(row.get(FILE_NAME), row.get(label)) for row in rows]


def _parse_parquet(where: str, data: bytes) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the columns and the rows of a Parquet file."""
    with explain(f"{where} needs the library pyarrow", ImportError, hint="pip install pyarrow"):
        import pyarrow
        from pyarrow import parquet
    with explain(f"cannot read {where}", pyarrow.ArrowException, OSError):
        table = parquet.read_table(pyarrow.BufferReader(data))
        return table.column_names, table.to_pylist()


def _parse_dataset(where: str, text: str) -> list[tuple[Any, Any]]:
    """Return the names and labels of a dataset.json: {"labels": [["00000/img00000000.png", 6], ...]}."""
    with explain(f"cannot read {where}", ValueError, RecursionError):
        content = json.loads(text)
    labels = content.get("labels") if isinstance(content, dict) else None
    if not isinstance(labels, list):
        raise NoLabels(f"{where} has no list of labels")
    for number, entry in enumerate(labels):
        if not isinstance(entry, list) or len(entry) != 2:
            raise UserError(f"{where}: entry {number} of labels is not a name and a label")
    return [(name, label) for name, label in labels]


def _parse_lines(where: str, text: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the columns and the rows of JSON lines."""
    rows = []
    columns: dict[str, None] = {}
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would split at characters inside of strings
        if not line.strip():
            continue
        with explain(f"cannot read {where}, line {number}", ValueError, RecursionError):
            row = json.loads(line)
        if not isinstance(row, dict):
            raise UserError(f"cannot read {where}, line {number}: not an object with columns")
        rows.append(row)
        columns |= dict.fromkeys(row)
    return list(columns), rows


def _parse_text(where: str, text: str, column: str | None, flag: str, metadata: bool) -> list[tuple[Any, Any]]:
    """Return the names and labels of a table with commas, tabs or spaces between columns, with or without a header.

    Without a header, names are in the first column and labels in the second one.

    Args:
        where: the file, for messages.
        text: its contents.
        column: the column of labels; None takes the only one.
        flag: the option that names the column.
        metadata: whether the table must have a header with `FILE_NAME`.
    """
    rows = _split_rows(where, text)
    if not rows:
        raise NoLabels(f"{where} is empty")
    header = [cell.strip() for cell in rows[0]]
    lower = [cell.lower() for cell in header]
    known = [name for name in NAME_COLUMNS if name in lower]
    if not known and (_names_labels(lower) or column in header[1:]):
        known = lower[:1]
    if metadata or known:
        names = FILE_NAME if metadata else header[lower.index(known[0])]
        label = _choose_column(where, header, names, column, flag)
        first, second = header.index(names), header.index(label)
        rows = rows[1:]
    elif column is not None:
        raise UserError(f"{where} has no header with a column of names, such as {FILE_NAME}; leave out {flag} {column}")
    else:
        first, second = 0, 1
    short = [row for row in rows if len(row) <= max(first, second)]
    if short:
        raise UserError(f"{where}: {len(short)} rows without a name and a label, the first is {' '.join(short[0])!r}")
    labels: list[Any] = [row[second].strip() for row in rows]
    if all(re.fullmatch(r"-?\d{1,18}", label) for label in labels):
        labels = [int(label) for label in labels]
    return [(row[first].strip(), label) for row, label in zip(rows, labels, strict=True)]


def _names_labels(cells: Sequence[str]) -> bool:
    """Return whether a first row is a header by its columns of labels, such as `picture,class`."""
    first, *others = cells
    names_image = re.search(r"[.\d]", first) is not None
    return not names_image and any(_has_labels(name) for name in others)


def _has_labels(column: str) -> bool:
    """Return whether the name of a column has a word of LABEL_WORDS, such as fine_label."""
    return not LABEL_WORDS.isdisjoint(re.split(r"[^a-z]+", column.lower()))


def _split_rows(where: str, text: str) -> list[list[str]]:
    """Return the cells of each row that is not blank, separated by tabs, else by commas, else by spaces."""
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    separator = next((character for character in "\t," if character in first), None)
    if separator is None:
        return [line.split() for line in lines if line.strip()]
    with explain(f"cannot read {where}", csv.Error):
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=separator))
    return [row for row in rows if any(cell.strip() for cell in row)]


def _choose_column(where: str, columns: Sequence[str], names: str, wanted: str | None, flag: str) -> str:
    """Return the column of labels: the wanted one, else the only one with a word of LABEL_WORDS.

    Other columns, such as captions, are not labels unless they are asked for.
    """
    if names not in columns:
        raise NoLabels(f"{where} has no column {names}")
    others = [column for column in columns if column != names]
    if wanted is not None:
        if wanted not in others:
            raise UserError(f"{where}: no column {wanted}; set {flag} to one of {', '.join(others)}")
        return wanted
    found = [column for column in others if _has_labels(column)]
    if not found and names != FILE_NAME and len(others) == 1:
        found = others  # a table of names and classes
    if not found:
        raise NoLabels(f"{where} has no column of labels; if one of {', '.join(others)} has them, set {flag}")
    if len(found) > 1:
        raise UserError(f"{where}: several columns of labels; set {flag} to one of {', '.join(found)}")
    return found[0]


def _collect(where: str, entries: list[tuple[Any, Any]]) -> Table:
    """Return a table of entries; raise a UserError if one has no name, or a name has two labels."""
    labels: dict[str, Any] = {}
    nameless = []
    twice = []
    for number, (name, label) in enumerate(entries):
        if not isinstance(name, str) or not name:
            nameless.append(number)
            continue
        key = "/".join(split_parts(name.replace("\\", "/")))
        if key in labels and labels[key] != label:
            twice.append(key)
        labels[key] = label
    if nameless:
        raise UserError(f"{where}: {len(nameless)} entries without the name of an image, the first is {nameless[0]}")
    if twice:
        raise UserError(f"{where}: {len(twice)} names with two labels, the first is {twice[0]}")
    if not labels:
        raise NoLabels(f"{where} has no entries")
    return Table(where, labels)
