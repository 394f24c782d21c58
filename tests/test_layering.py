"""Imports run one way: nn, diffusion, data and metrics are islands, and only tasks and above know Lightning."""

import ast

import pytest
from conftest import ROOT

PACKAGE = ROOT / "uvit_decay"
ISLANDS = {"nn", "diffusion", "data", "metrics", "representations"}
ABOVE = {"evaluation", "compare", "tasks", "callbacks", "checkpoint", "samples", "cli"}
FORBIDDEN = {
    "runtime": ISLANDS | ABOVE | {"decay"},
    "decay": ISLANDS | ABOVE,
    "nn": (ISLANDS | ABOVE) - {"nn"},
    "diffusion": (ISLANDS | ABOVE | {"decay"}) - {"diffusion"},
    "data": (ISLANDS | ABOVE | {"decay"}) - {"data"},
    "metrics": (ISLANDS | ABOVE | {"decay"}) - {"metrics"},
    "representations": {"tasks", "callbacks", "compare", "cli", "decay"},
    "evaluation": {"tasks", "callbacks", "cli"},
    "tasks": {"evaluation", "representations", "compare", "callbacks", "cli"},
    "checkpoint": ABOVE - {"checkpoint"} | {"representations"},
}
WITHOUT_LIGHTNING = (
    "nn",
    "diffusion",
    "metrics",
    "representations",
    "decay",
    "runtime",
    "compare",
    "checkpoint",
    "image_io.py",
    "autoencoder.py",
    "samples.py",
    "sampling_options.py",
    "sample_files.py",
    "plots.py",
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
    files = list((PACKAGE / layer).rglob("*.py"))
    assert files
    for path in files:
        used = {name.split(".")[1] for name in imported(path) if name.startswith("uvit_decay.")}
        assert not used & FORBIDDEN[layer], f"{path} imports {used & FORBIDDEN[layer]}"


@pytest.mark.parametrize("place", WITHOUT_LIGHTNING)
def test_lightning_is_not_imported(place):
    target = PACKAGE / place
    for path in [target] if target.is_file() else target.rglob("*.py"):
        assert not [name for name in imported(path) if name.split(".")[0] == "lightning"], path


def test_sample_imports_no_lightning():
    assert not [name for name in imported(ROOT / "sample.py") if name.split(".")[0] == "lightning"]
