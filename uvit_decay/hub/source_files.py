"""Modules of this package as source text, statement by statement, with what each statement needs of others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import uvit_decay

HOME = uvit_decay.__name__
FOLDER = Path(uvit_decay.__file__).parent.parent


class Name(NamedTuple):
    """A name at the top of a module; of a module of another package, or of this one."""

    module: str
    name: str


class Edit(NamedTuple):
    """A replacement of the characters `start` to `end` of a line, counted in bytes as `ast` does."""

    line: int
    start: int
    end: int
    text: str


class Source:
    """A module of this package: its docstring, the names at its top and the statements that define them."""

    def __init__(self, module: str) -> None:
        self.module = module
        text = path_of(module).read_text()
        self.lines, tree = text.splitlines(), ast.parse(text)
        self.about = ast.get_docstring(tree) or ""
        self.statements = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
        self.imported = {name: target for node in tree.body for name, target in imports(node)}
        self.defined = {name: node for node in self.statements for name in names_of(node)}

    def text(self, node: ast.stmt, edits: list[Edit]) -> str:
        """Return the lines of a statement, with the comments above it and with the edits made."""
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]) - 1
        while first > 0 and self.lines[first - 1].startswith("#"):
            first -= 1
        lines = [line.encode() for line in self.lines]
        for edit in sorted(edits, reverse=True):
            line = lines[edit.line - 1]
            lines[edit.line - 1] = line[: edit.start] + edit.text.encode() + line[edit.end :]
        return "\n".join(line.decode() for line in lines[first : node.end_lineno])


def path_of(module: str) -> Path | None:
    """Return the file of a module of this package; None if there is no such module."""
    file = FOLDER.joinpath(*module.split("."))
    files = (file.with_suffix(".py"), file / "__init__.py")
    return next((file for file in files if file.is_file()), None)


@cache
def source(module: str) -> Source:
    """Return a module of this package."""
    return Source(module)


def is_ours(module: str) -> bool:
    """Return whether a module is of this package."""
    return module.split(".")[0] == HOME


def imports(node: ast.stmt) -> Iterator[tuple[str, Name]]:
    """Yield the names that an import at the top of a module gives, and what they are; a module is Name(module, "")."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.split(".")[0], Name(alias.name, "")
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            is_module = is_ours(full) and path_of(full) is not None
            yield alias.asname or alias.name, Name(full, "") if is_module else Name(node.module, alias.name)


def names_of(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement at the top of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))
