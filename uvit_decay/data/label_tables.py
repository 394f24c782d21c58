"""Tables of labels: dataset.json of EDM and StyleGAN, metadata of Hugging Face's imagefolder, csv, tsv and text."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from uvit_decay.data.classes import compose, split_parts
from uvit_decay.terminal.errors import UserError, explain

DATASET = "dataset.json"
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
TABLES = (".json", ".jsonl", ".csv", ".parquet")  # extensions of these files
FILE_NAME = "file_name"  # the column of names in metadata
LABEL_WORDS = {"label", "labels", "class", "category", "target"}  # a column of labels has one, such as fine_label


class NoLabels(UserError):
    """A file that may have labels has none, such as metadata with captions."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a table; None for the column that its header names, see `read_table`.

    Args:
        names: the column with the names of images.
        labels: the column with their labels.
    """

    names: str | None = None
    labels: str | None = None


@dataclass(frozen=True)
class Table:
    """Labels by the names of images, relative to the folder of the table.

    Args:
        where: the file, for messages.
        labels: int or text by name, or any other value that the file has in its place.
    """

    where: str
    labels: dict[str, Any]


def read_table(where: str, data: bytes, columns: Columns, images: Collection[str] = ()) -> Table:
    """Return the labels in the contents of a file.

    The names of images are in the column `file_name`, and labels in the only column with a word of LABEL_WORDS, unless
    `columns` names others. A text file of one's own without a column `file_name` has the names in its first column and
    the labels in the second one. Its first row is a header if it does not name an image; a header of more columns needs
    `columns`.

    Args:
        where: the file, for messages; its extension tells the format.
        data: its contents.
        columns: names of its columns.
        images: the names that a table of one's own may have for the images.

    Raises:
        NoLabels: the file is whole, but has no names of images or no labels.
        UserError: the file is damaged, or has several columns of labels.
    """
    file_name = where.rpartition("/")[2].lower()
    if file_name.endswith(".parquet"):
        header, rows = _parse_parquet(where, data)
        return _collect(where, _choose_entries(where, header, rows, columns))
    with explain(f"cannot read {where}", UnicodeDecodeError):
        text = data.decode("utf-8-sig")  # with or without the byte order mark of Windows
    if file_name.endswith(".json"):
        return _collect(where, _parse_dataset(where, text))
    if file_name.endswith((".jsonl", ".ndjson")):
        header, rows = _parse_lines(where, text)
        return _collect(where, _choose_entries(where, header, rows, columns))
    return _collect(where, _parse_text(where, text, columns, None if file_name in METADATA else images))


def _choose_entries(
    where: str, header: list[str], rows: list[dict[str, Any]], columns: Columns
) -> list[tuple[Any, Any]]:
    """Return the names and labels of rows with named columns."""
    names, labels = _choose_columns(where, header, columns, FILE_NAME)
    return [(row.get(names), row.get(labels)) for row in rows]


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
    with explain(f"cannot read {where}", ValueError, TypeError, RecursionError):
        content = json.loads(text)
        labels = content.get("labels") if isinstance(content, dict) else None
        if not isinstance(labels, list):
            raise NoLabels(f"{where} has no list of labels")
        return [(name, label) for name, label in labels]


def _parse_lines(where: str, text: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the columns and the rows of JSON lines."""
    rows = []
    columns: dict[str, None] = {}
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would split at characters inside of strings
        if not line.strip():
            continue
        with explain(f"cannot read {where}, line {number}", ValueError, TypeError, RecursionError):
            row = json.loads(line)
            columns |= dict.fromkeys(row)
        rows.append(row)
    return list(columns), rows


def _parse_text(where: str, text: str, columns: Columns, images: Collection[str] | None) -> list[tuple[Any, Any]]:
    """Return the names and labels of a table of text; arguments as in `read_table`, `images` None for metadata."""
    rows = _split_rows(where, text)
    header = [cell.strip() for cell in rows[0]]
    first, second, has_header = 0, 1, True
    if images is None or FILE_NAME in header or columns != Columns():
        default = FILE_NAME
        if images is not None and FILE_NAME not in header:
            default = next((name for name in header if name != columns.labels), FILE_NAME)
        name_column, label_column = _choose_columns(where, header, columns, default)
        first, second = header.index(name_column), header.index(label_column)
    elif _normalise(header[0]) in images:
        has_header = False
    elif len(header) > 2:
        raise UserError(f"{where}: set `name_column` and `label_column` to two of {', '.join(header)}")
    short = [row for row in rows if len(row) <= max(first, second)]
    if short:
        what = f"{len(short)} rows without a name and a label, the first is {' '.join(short[0])!r}"
        raise UserError(f"{where}: {what}; separate the columns by commas, tabs or spaces, and remove other rows")
    if has_header:
        rows = rows[1:]
    labels: list[Any] = [row[second].strip() for row in rows]
    if all(re.fullmatch(r"-?\d{1,18}", label) for label in labels):
        labels = [int(label) for label in labels]
    return [(row[first].strip(), label) for row, label in zip(rows, labels, strict=True)]


def _split_rows(where: str, text: str) -> list[list[str]]:
    """Return the cells of each row that is not blank, separated by tabs, or by commas, or by spaces.

    Raises:
        NoLabels: the file is empty.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise NoLabels(f"{where} is empty")
    separator = next((character for character in "\t," if character in lines[0]), None)
    if separator is None:
        return [line.split() for line in lines]
    with explain(f"cannot read {where}", csv.Error):
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=separator))
    return [row for row in rows if any(cell.strip() for cell in row)]


def _choose_columns(where: str, header: Sequence[str], columns: Columns, default: str) -> tuple[str, str]:
    """Return the columns of names and of labels; `default` is the column of names if `columns` has none.

    Without a column of labels in `columns`, it is the only one with a word of LABEL_WORDS, or beside a column of names
    that was given the only other one. Other columns, such as captions, are not labels unless they are asked for.
    """
    names = columns.names or default
    if names not in header:
        if columns.names:
            raise UserError(f"{where}: no column {names}; set `name_column` to one of {', '.join(header)}")
        raise NoLabels(f"{where} has no column {names}")
    others = [column for column in header if column != names]
    if columns.labels is not None:
        if columns.labels not in others:
            raise UserError(f"{where}: no column {columns.labels}; set `label_column` to one of {', '.join(others)}")
        return names, columns.labels
    found = [column for column in others if not LABEL_WORDS.isdisjoint(re.split(r"[^a-z]+", column.lower()))]
    if not found and columns.names and len(others) == 1:
        found = others
    if not found:
        raise NoLabels(f"{where} has no column of labels; if one of {', '.join(others)} has them, set `label_column`")
    if len(found) > 1:
        raise UserError(f"{where}: several columns of labels; set `label_column` to one of {', '.join(found)}")
    return names, found[0]


def _collect(where: str, entries: list[tuple[Any, Any]]) -> Table:
    """Return a table of entries; raise a UserError if a name has two labels."""
    labels: dict[str, Any] = {}
    twice = []
    for name, label in entries:
        key = _normalise(str(name))  # a number or null in JSON and Parquet
        if key in labels and labels[key] != label:
            twice.append(key)
        labels[key] = label
    if twice:
        remedy = "keep one, or set `name_column` and `label_column` if these are not the names of images"
        raise UserError(f"{where}: {len(twice)} names with two labels, the first is {twice[0]}; {remedy}")
    if not labels:
        raise NoLabels(f"{where} has no entries")
    return Table(where, labels)


def _normalise(name: str) -> str:
    """Return the name of an image with '/' between folders, in the form that does not depend on who wrote it."""
    return compose("/".join(split_parts(name.replace("\\", "/"))))
