"""Bundling of a class of this package into one file of Python that needs torch and diffusers only.

diffusers runs a class of a folder from a single file. The file is assembled here from whole modules, in the order in
which Python runs them, without their imports of each other. No two modules may use one name for different things.
"""

from __future__ import annotations

import ast
from importlib.metadata import version
from pathlib import Path

import uvit_decay
from uvit_decay.hub.pipeline import HOME, CodeFile, name_code

FOLDER = Path(uvit_decay.__file__).parent.parent
ANNOTATIONS = "jaxtyping"  # package of names that are used only in annotations, apart from Float in ABOUT
UNUSED = ("uvit_decay.decay.attach", "uvit_decay.decay.blocks")  # not used by our own networks
OPTIONAL = ("torchdiffeq",)  # imported where they are used: diffusers requires every package after the word `import`
DOOR = "uvit_decay.terminal.typed"  # checks types with beartype, which a folder does without
OPEN_DOOR = """def check_types(public):
    \"\"\"Return a function or a class as it is; the package checks the types of its arguments.\"\"\"
    return public


class Needs:
    \"\"\"An argument that needs a value of another one, which only the package checks.\"\"\"

    def __init__(self, *values: object, **options: object) -> None:
        pass
"""
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
    """Return a file with a class of this package and all modules of the package that it needs.

    The modules must not have parts that only type checkers read.
    """
    modules = order_modules(kind.__module__)
    listed = []
    parts = []
    for module in modules:
        title = module.replace(".", "/")
        listed.append(f"    {title}")
        parts.append(f"# {'-' * 118}\n# {title}\n\n{remove_imports(module)}")
    about = ABOUT.format(kind=kind.__name__, home=HOME, version=version(HOME), modules="\n".join(listed))
    return name_code(kind.__name__, "\n\n".join([about, *parts]))


def order_modules(module: str, done: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return `done`, then the modules that `module` imports, then `module`: the order in which Python runs them."""
    for node in ast.walk(ast.parse(path_of(module).read_text())):
        for other in find_imports(node):
            if other not in done and other not in UNUSED:
                done = order_modules(other, done)
    return (*done, module)


def find_imports(node: ast.stmt) -> list[str]:
    """Return the modules of this package that a statement imports."""
    if not isinstance(node, ast.ImportFrom) or _root(node) != HOME:
        return []
    modules = []
    for alias in node.names:
        submodule = f"{node.module}.{alias.name}"
        modules.append(submodule if path_of(submodule).is_file() else node.module)
    return modules


def path_of(module: str) -> Path:
    """Return the file of a module of this package; it need not exist."""
    folder = FOLDER.joinpath(*module.split("."))
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def remove_imports(module: str) -> str:
    """Return the text of a module without its imports of this package, of annotations and of optional packages."""
    if module == DOOR:
        return OPEN_DOOR
    text = path_of(module).read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and _root(node) in (HOME, ANNOTATIONS, *OPTIONAL, "__future__"):
            statements = [_replace_import(node, alias.name) for alias in node.names]
            lines[node.lineno - 1] = " " * node.col_offset + "; ".join(filter(None, statements))
            lines[node.lineno : node.end_lineno] = [""] * (node.end_lineno - node.lineno)
    return "\n".join(lines).strip("\n") + "\n"


def _replace_import(node: ast.ImportFrom, name: str) -> str:
    """Return the statement for the bundled file that replaces the import of a name; it may be empty."""
    if _root(node) in OPTIONAL:
        return f'{name} = import_module("{node.module}").{name}'
    if _root(node) == HOME and path_of(f"{node.module}.{name}").is_file():
        return f"{name} = sys.modules[__name__]"  # the module is part of the same file
    return "pass" if node.col_offset else ""


def _root(node: ast.ImportFrom) -> str:
    return node.module.split(".")[0]
