"""The structure: imports run one way and in no circle, functions fit on a screen."""

import ast
import subprocess
import sys
from functools import cache

import pytest
from conftest import ROOT

PACKAGE = ROOT / "uvit_decay"
ISLANDS = {"nn", "diffusion", "data", "metrics", "representations"}
ABOVE = {"evaluation", "compare", "runs", "tasks", "callbacks", "checkpoint", "generation", "doctor", "commands"}
ABOVE |= {"hub"}
FORBIDDEN = {
    "runtime": ISLANDS | ABOVE | {"decay"},
    "decay": ISLANDS | ABOVE,
    "images": ISLANDS | ABOVE | {"decay"},
    "nn": (ISLANDS | ABOVE) - {"nn"},
    "diffusion": (ISLANDS | ABOVE | {"decay"}) - {"diffusion"},
    "data": (ISLANDS | ABOVE | {"decay"}) - {"data"},
    "metrics": (ISLANDS | ABOVE | {"decay"}) - {"metrics"},
    "representations": {"evaluation", "tasks", "callbacks", "compare", "doctor", "commands", "decay", "hub"},
    "compare": (ISLANDS | ABOVE | {"decay"}) - {"compare", "evaluation", "runs"},  # reads the table of metrics
    "runs": (ISLANDS | ABOVE | {"decay"}) - {"runs", "data", "checkpoint"},
    "evaluation": {"tasks", "callbacks", "doctor", "commands", "hub"},
    "tasks": ABOVE
    - {"tasks", "runs", "generation", "checkpoint"},  # REPA's teacher is opened as probes open their networks
    "callbacks": {"compare", "doctor", "commands", "hub"},
    "doctor": {"compare", "representations", "commands", "hub"},
    "checkpoint": ABOVE - {"checkpoint"} | {"representations"},
    "generation": ABOVE - {"generation", "checkpoint"} | {"metrics", "representations"},  # reads the names of classes
    "hub": {"tasks", "callbacks", "doctor", "commands"},
}
WITH_LIGHTNING = {"callbacks", "commands", "data", "doctor", "runs", "tasks"}
LONGEST_FUNCTION, LONGEST_FILE = 60, 400


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


def lines(paths):
    return sum(path.read_text().count("\n") for path in paths)


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
    modules = [path for name in ("representations", "compare") for path in (PACKAGE / name).glob("[a-z]*.py")]
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


def test_functions_fit_on_a_screen_and_files_have_one_subject():
    for path in library():
        assert lines([path]) <= LONGEST_FILE, path
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < LONGEST_FUNCTION, f"{path}: {node.name}"
