"""A class of this package with all that it needs of it, as one file of Python that needs torch and diffusers only.

diffusers runs a class of a folder from a single file. That file is put together here from the sources of this package:
the statements that the class needs, directly or not, in the order in which Python would have run them, module by
module with their docstrings and comments. Nothing else is changed but names that two modules give to different things,
and what `stand_ins.py` replaces.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from typing import NamedTuple

from uvit_decay.hub.code import CodeFile, file_name
from uvit_decay.hub.source_files import HOME, Edit, Name, Source, is_ours, names_of, source

STAND_INS = f"{HOME}.hub.stand_ins"
REPLACED = ("einops", "jaxtyping", f"{HOME}.nn.pretrained")  # modules whose names are those of STAND_INS
OPTIONAL = ("torchdiffeq",)  # imported by name where they are used: diffusers looks for `import` and wants all of them
ABOUT = '''"""{kind} of {home} {version}, in one file that needs torch and diffusers only.

Made of these sources of {home}, each under its name and docstring:
{modules}
"""

from __future__ import annotations
'''


def standalone(kind: type) -> CodeFile:
    """Return a self-contained file with this class of this package; its name tells its contents."""
    text = Bundle(Name(kind.__module__, kind.__name__)).text()
    return CodeFile(kind.__name__, f"{file_name(kind)}_{sha256(text.encode()).hexdigest()[:8]}", text)


class Reference(NamedTuple):
    """A place in a module where a name is used, as it is written there, and what it means."""

    written: str
    target: Name
    node: ast.expr


class Bundle:
    """The statements that define `root`, and all that they need of this package."""

    def __init__(self, root: Name) -> None:
        self.root = target(root)
        self.needed: dict[str, set[ast.stmt]] = {}  # statements by module
        self.outside: dict[str, Name] = {}  # names of other packages, as they are written here
        self._collect()
        self.modules = self._in_order(self.root.module)
        self.renamed = self._renamed()

    def text(self) -> str:
        """Return the file."""
        listed = "\n".join(f"    {module.replace('.', '/')}.py" for module in self.modules)
        head = ABOUT.format(kind=self.root.name, home=HOME, version=version(HOME), modules=listed)
        if "annotations" not in source(self.root.module).imported:
            head = head.partition("\nfrom __future__")[0]
        sections = [self._section(source(module)) for module in self.modules]
        return "\n\n".join([f"{head}\n{self._imports()}", *sections]) + "\n"

    def _collect(self) -> None:
        """Find all statements that are needed."""
        waiting = [self.root]
        while waiting:
            name = waiting.pop()
            node, nodes = source(name.module).defined[name.name], self.needed.setdefault(name.module, set())
            if node in nodes:
                continue
            nodes.add(node)
            for reference in references(source(name.module), node):
                if is_ours(reference.target.module):
                    waiting.append(reference.target)
                elif self.outside.setdefault(reference.written, reference.target) != reference.target:
                    raise ValueError(f"{reference.written} is imported from two packages")
            self.outside |= {"import_module": Name("importlib", "import_module")} if optional_imports(node) else {}

    def _in_order(self, module: str, done: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return `done` with this module after those that it needs, in the order in which Python runs them."""
        for node in self._statements(source(module)):
            for reference in references(source(module), node):
                other = reference.target.module
                if is_ours(other) and other != module and other not in done:
                    done = self._in_order(other, done)
        return (*done, module) if module not in done else done

    def _statements(self, module: Source) -> list[ast.stmt]:
        """Return the statements that are needed of a module, in order."""
        return [node for node in module.statements if node in self.needed[module.module]]

    def _renamed(self) -> dict[Name, str]:
        """Return new names for those that a module before has given to something else."""
        taken, renamed = {*self.outside, *dir(builtins)}, {}
        for module in self.modules:
            for name in [name for node in self._statements(source(module)) for name in names_of(node)]:
                if name in taken:
                    stem = module.rpartition(".")[2]
                    renamed[Name(module, name)] = f"{stem.upper() if name.isupper() else stem}_{name}"
                taken.add(renamed.get(Name(module, name), name))
        return renamed

    def _imports(self) -> str:
        """Return the imports of other packages."""
        lines: dict[str, list[str]] = {}
        for written, (module, name) in sorted(self.outside.items()):
            own = name or module.split(".")[0]
            alias = f" as {written}" if written != own else ""
            key = f"from {module} import " if name else f"import {module}"
            lines.setdefault(key, []).append(f"{name}{alias}")
        return "\n".join(f"{start}{', '.join(names)}" for start, names in sorted(lines.items(), key=_import_order))

    def _section(self, module: Source) -> str:
        """Return what is needed of a module, under its name and docstring."""
        about = [f"# {line}".rstrip() for line in module.about.splitlines()]
        parts = ["\n".join([f"# {'-' * 118}", f"# {module.module.replace('.', '/')}.py", "#", *about])]
        statements = self._statements(module)
        for before, node in zip([None, *statements], statements, strict=False):
            simple = before is not None and not {type(before), type(node)} & {ast.FunctionDef, ast.ClassDef}
            parts.append(("\n" if simple else "\n\n\n") + module.text(node, self._edits(module, node)))
        return "".join(parts)

    def _edits(self, module: Source, node: ast.stmt) -> list[Edit]:
        """Return the changes in a statement: names that are renamed, or written with their module; optional imports."""
        edits = []
        for written, meant, place in references(module, node):
            text = self.renamed.get(meant, meant.name) if is_ours(meant.module) else written
            if text != written:
                edits.append(Edit(place.lineno, place.col_offset, place.end_col_offset, text))
        for place in optional_imports(node):
            (alias,) = place.names
            text = f'{alias.name} = import_module("{place.module}").{alias.name}'
            edits.append(Edit(place.lineno, place.col_offset, place.end_col_offset, text))
        own = getattr(node, "name", None)
        if new := self.renamed.get(Name(module.module, own)):
            start = module.lines[node.lineno - 1].index(own, node.col_offset + len("def"))
            edits.append(Edit(node.lineno, start, start + len(own), new))
        return edits


def target(name: Name) -> Name:
    """Return where a name is defined, or that of its replacement; one of another package as it is."""
    while name.module not in REPLACED and is_ours(name.module) and name.name not in source(name.module).defined:
        name = source(name.module).imported[name.name]
    return Name(STAND_INS, name.name) if name.module in REPLACED else name


def references(module: Source, node: ast.stmt) -> Iterator[Reference]:
    """Yield the uses in a statement of names at the top of its module, such as `shortcuts` or `decay.shortcuts`."""
    done = set()
    for part in ast.walk(node):
        if isinstance(part, ast.ImportFrom) and is_ours(part.module or HOME):
            raise ValueError(f"{module.module} imports {part.module} within a function")
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            owner = module.imported.get(part.value.id)
            if owner and is_ours(owner.module) and not owner.name:
                done.add(part.value)
                yield Reference(f"{part.value.id}.{part.attr}", target(Name(owner.module, part.attr)), part)
        elif isinstance(part, ast.Name) and part not in done:
            if part.id in module.defined:
                yield Reference(part.id, Name(module.module, part.id), part)
            elif part.id in module.imported:
                yield Reference(part.id, target(module.imported[part.id]), part)


def optional_imports(node: ast.stmt) -> list[ast.ImportFrom]:
    """Return the imports within a statement of packages that are not always needed."""
    return [part for part in ast.walk(node) if isinstance(part, ast.ImportFrom) and part.module in OPTIONAL]


def _import_order(line: tuple[str, list[str]]) -> tuple[bool, str]:
    return line[0].startswith("from"), line[0]
