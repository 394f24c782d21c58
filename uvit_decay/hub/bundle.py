"""A class of this package with all that it needs of it, as one file of Python that needs torch and diffusers only.

diffusers runs a class of a folder from a single file. That file is put together here of whole modules, in the order in
which Python runs them, without their imports of one another: no two of them may give a name to different things.
"""

from __future__ import annotations

import ast
from importlib.metadata import version
from pathlib import Path

import uvit_decay
from uvit_decay.hub.pipeline import HOME, CodeFile, named

FOLDER = Path(uvit_decay.__file__).parent.parent
ANNOTATIONS = "jaxtyping"  # package of names that are not evaluated, apart from Float in ABOUT
UNUSED = ("uvit_decay.decay.attach", "uvit_decay.decay.blocks")  # by our own networks
OPTIONAL = ("torchdiffeq",)  # imported where it is used: diffusers asks for every package after the word `import`
ABOUT = '''"""{kind} of {home} {version}, in one file that needs torch and diffusers only: the modules

{modules}
"""

from __future__ import annotations

import sys
from importlib import import_module


class Float:
    """A tensor of floats in an annotation, Float[Tensor, "shape"], which is not checked here."""

    def __class_getitem__(cls, annotation: tuple[type, str]) -> type:
        return annotation[0]
'''


def bundle(kind: type) -> CodeFile:
    """Return a file with this class of this package, whose module has no part that only type checkers read."""
    modules = in_order(kind.__module__)
    listed = "\n".join(f"    {module.replace('.', '/')}" for module in modules)
    head = ABOUT.format(kind=kind.__name__, home=HOME, version=version(HOME), modules=listed)
    parts = [f"# {'-' * 118}\n# {module.replace('.', '/')}\n\n{without_imports(module)}" for module in modules]
    return named(kind.__name__, "\n\n".join([head, *parts]))


def in_order(module: str, done: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return `done` with this module after those that it imports, in the order in which Python runs them."""
    for node in ast.parse(path_of(module).read_text()).body:
        for other in needed(node):
            done = done if other in (*done, *UNUSED) else in_order(other, done)
    return (*done, module)


def needed(node: ast.stmt) -> list[str]:
    """Return the modules of this package that a statement imports."""
    if not isinstance(node, ast.ImportFrom) or _root(node) != HOME:
        return []
    submodules = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if path_of(name).is_file() else node.module for name in submodules]


def path_of(module: str) -> Path:
    """Return the file that a module of this package has, or would have."""
    folder = FOLDER.joinpath(*module.split("."))
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def without_imports(module: str) -> str:
    """Return the text of a module without its imports of this package and of names in annotations."""
    text = path_of(module).read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and _root(node) in (HOME, ANNOTATIONS, *OPTIONAL, "__future__"):
            instead = [_instead(node, alias.name) for alias in node.names]
            lines[node.lineno - 1] = " " * node.col_offset + "; ".join(filter(None, instead))
            lines[node.lineno : node.end_lineno] = [""] * (node.end_lineno - node.lineno)
    return "\n".join(lines).strip("\n") + "\n"


def _instead(node: ast.ImportFrom, name: str) -> str:
    """Return what replaces the import of a name: a module of this package is this file, too."""
    if _root(node) in OPTIONAL:
        return f'{name} = import_module("{node.module}").{name}'
    if _root(node) == HOME and path_of(f"{node.module}.{name}").is_file():
        return f"{name} = sys.modules[__name__]"
    return "pass" if node.col_offset else ""


def _root(node: ast.ImportFrom) -> str:
    return node.module.split(".")[0]
