"""Imports run one way: nn, diffusion, data and metrics are islands, and only tasks and above know Lightning."""

import ast
import subprocess
import sys

import pytest
from conftest import ROOT

PACKAGE = ROOT / "uvit_decay"
ISLANDS = {"nn", "diffusion", "data", "metrics", "representations"}
ABOVE = {
    "evaluation",
    "compare",
    "tasks",
    "callbacks",
    "checkpoint",
    "samples",
    "preflight",
    "configurations",
    "cli",
    "doctor",
    "scripts",
    "hub",
}
FORBIDDEN = {
    "runtime": ISLANDS | ABOVE | {"decay"},
    "decay": ISLANDS | ABOVE,
    "nn": (ISLANDS | ABOVE) - {"nn"},
    "diffusion": (ISLANDS | ABOVE | {"decay"}) - {"diffusion"},
    "data": (ISLANDS | ABOVE | {"decay"}) - {"data"},
    "metrics": (ISLANDS | ABOVE | {"decay"}) - {"metrics"},
    "representations": {"tasks", "callbacks", "compare", "preflight", "cli", "doctor", "scripts", "decay", "hub"},
    "compare": (ISLANDS | ABOVE | {"decay"}) - {"compare", "evaluation"},  # reads the table of metrics
    "history.py": ISLANDS | ABOVE | {"decay"},
    "evaluation": {"tasks", "callbacks", "preflight", "configurations", "cli", "doctor", "scripts", "hub"},
    "tasks": ABOVE - {"tasks", "samples", "checkpoint"} | {"representations"},
    "callbacks": {"compare", "preflight", "configurations", "cli", "doctor", "scripts", "hub"},
    "preflight": {"compare", "representations", "cli", "doctor", "scripts", "hub"},
    "checkpoint": ABOVE - {"checkpoint"} | {"representations"},
    "hub": {"tasks", "callbacks", "preflight", "configurations", "cli", "doctor"},
}
COMMANDS = {PACKAGE / "checkpoint" / "__main__.py": {"hub"}}  # a command stands above its room: what it may use, too
WITHOUT_LIGHTNING = (
    "nn",
    "diffusion",
    "metrics",
    "representations",
    "decay",
    "runtime",
    "compare",
    "checkpoint",
    "hub",
    "image_io.py",
    "autoencoder.py",
    "samples.py",
    "sampling_options.py",
    "sample_files.py",
    "plots.py",
    "history.py",
    "scripts",
    "__main__.py",
)


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_a_layer_imports_nothing_from_above_or_beside_it(layer):
    files = [PACKAGE / layer] if layer.endswith(".py") else list((PACKAGE / layer).rglob("*.py"))
    assert files
    for path in files:
        used = {name.split(".")[1] for name in imported(path) if name.startswith("uvit_decay.")}
        used &= FORBIDDEN[layer] - COMMANDS.get(path, set())
        assert not used, f"{path} imports {used}"


@pytest.mark.parametrize("place", WITHOUT_LIGHTNING)
def test_lightning_is_not_imported(place):
    target = PACKAGE / place
    for path in [target] if target.is_file() else target.rglob("*.py"):
        assert not [name for name in imported(path) if name.split(".")[0] == "lightning"], path


def test_sample_imports_no_lightning():
    assert not [name for name in imported(ROOT / "sample.py") if name.split(".")[0] == "lightning"]


def test_what_judges_features_and_compares_runs_loads_no_lightning_at_all():
    modules = [path for room in ("representations", "compare") for path in (PACKAGE / room).glob("[a-z]*.py")]
    names = [f"uvit_decay.{path.parent.name}.{path.stem}" for path in modules]
    program = f"import {', '.join(names)}, sys; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
