"""The structure: imports run one way and in no circle; long functions and files are named in a warning."""

import ast
import subprocess
import sys
import warnings
from functools import cache

import pytest
from conftest import ROOT

PACKAGE = ROOT / "uvit_decay"
ISLANDS = {"nn", "diffusion", "data", "metrics", "representations"}
ABOVE = {"evaluation", "compare", "runs", "tasks", "callbacks", "checkpoint", "generation", "doctor", "commands"}
ABOVE |= {"hub", "encoders"}
FORBIDDEN = {
    "terminal": ISLANDS | ABOVE | {"decay", "files", "runtime"},
    "files": ISLANDS | ABOVE | {"decay", "runtime"},
    "runtime": ISLANDS | ABOVE | {"decay"},
    "decay": ISLANDS | ABOVE,
    "pictures.py": ISLANDS | ABOVE | {"decay"},
    "latents": (ISLANDS | ABOVE | {"decay"}) - {"data"},
    "nn": (ISLANDS | ABOVE) - {"nn"},
    "diffusion": (ISLANDS | ABOVE | {"decay"}) - {"diffusion"},
    "data": (ISLANDS | ABOVE | {"decay"}) - {"data"},
    "metrics": (ISLANDS | ABOVE | {"decay"}) - {"metrics"},
    "encoders": ABOVE - {"encoders", "checkpoint", "generation", "runs"}
    | {"data", "metrics", "representations", "decay"},
    "representations": {"evaluation", "tasks", "callbacks", "compare", "doctor", "commands", "decay", "hub"},
    "compare": (ISLANDS | ABOVE | {"decay"}) - {"compare", "evaluation", "runs"},  # reads the table of metrics
    "runs": (ISLANDS | ABOVE | {"decay"}) - {"runs", "data", "checkpoint"},
    "evaluation": {"tasks", "callbacks", "doctor", "commands", "hub"},
    "tasks": ABOVE - {"tasks", "runs", "generation", "checkpoint", "encoders"},
    "callbacks": {"compare", "doctor", "commands", "hub"},
    "doctor": {"compare", "representations", "commands", "hub"},
    "checkpoint": ABOVE - {"checkpoint"} | {"representations"},
    "generation": ABOVE - {"generation", "checkpoint"} | {"metrics", "representations"},  # reads the names of classes
    "hub": {"tasks", "callbacks", "doctor", "commands"},
}
WITH_LIGHTNING = {"callbacks", "commands", "data", "doctor", "runs", "tasks"}
MOST_CODE, MOST_LINES = 80, 500  # lines of code of a function; lines of a file


@cache
def tree(path):
    return ast.parse(path.read_text())


def imported(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def library():
    return sorted(PACKAGE.rglob("*.py"))


def too_long(path):
    """Yield a line for a file and for each of its functions that is too long; docstrings and comments are no code."""
    text = path.read_text().splitlines()
    if len(text) > MOST_LINES:
        yield f"{path}: {len(text)} lines"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            inside = text[node.lineno - 1 : node.end_lineno]
            if ast.get_docstring(node):
                first = node.body[0]
                del inside[first.lineno - node.lineno : first.end_lineno - node.lineno + 1]
            count = len([line for line in inside if line.strip() and not line.lstrip().startswith("#")])
            if count > MOST_CODE:
                yield f"{path}: {node.name} has {count} lines of code"


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_a_layer_imports_nothing_from_above_or_beside_it(layer):
    files = [PACKAGE / layer] if layer.endswith(".py") else list((PACKAGE / layer).rglob("*.py"))
    assert files
    for path in files:
        used = {name.split(".")[1] for name in imported(path) if name.startswith("uvit_decay.")} & FORBIDDEN[layer]
        assert not used, f"{path} imports {used}"


def test_lightning_is_imported_where_runs_are_made_and_nowhere_else():
    users = {path for path in library() if any(name.split(".")[0] == "lightning" for name in imported(path))}
    assert {path.relative_to(PACKAGE).parts[0] for path in users} == WITH_LIGHTNING


def test_what_samples_evaluates_compares_runs_and_reads_official_files_loads_no_lightning_at_all():
    modules = []
    for name in ("encoders", "metrics", "representations", "compare"):
        modules += (PACKAGE / name).glob("[a-z]*.py")
    names = ["uvit_decay.checkpoint.convert", "uvit_decay.generation.samples"]
    names += [f"uvit_decay.{path.parent.name}.{path.stem}" for path in modules]
    program = f"import {', '.join(names)}, sys; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_no_module_imports_itself_by_way_of_others():
    """Imports inside functions and under TYPE_CHECKING count, too; the packages' __init__ only gather names."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in library()}
    modules = {name: path for name, path in paths.items() if path.name != "__init__.py"}
    graph = {name: {used for used in imported(path) if used in modules} for name, path in modules.items()}
    for start in modules:
        reached, waiting = set(), [start]
        while waiting:
            found = graph[waiting.pop()] - reached
            reached |= found
            waiting += found
        assert start not in reached, f"{start} imports itself through {sorted(reached)}"


def test_no_class_stands_on_a_private_class_of_lightning():
    for path in library():
        nodes = [*ast.walk(tree(path))]
        private = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module.startswith("lightning")
            for alias in node.names
            if alias.name.startswith("_")
        }
        bases = {ast.unparse(base) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases}
        assert not private & bases, path


def test_long_functions_and_files_are_warned_of():
    """Long is often not clear; but a function that is split into pieces with one caller each is not clearer."""
    for path in library():
        for place in too_long(path):
            warnings.warn(place, stacklevel=1)
