"""Imports run one way: nn, diffusion, data and metrics are islands, and only tasks and above know Lightning."""

import ast

import pytest
from conftest import ROOT

PACKAGE = ROOT / "uvit_decay"
FORBIDDEN = {
    "decay": {"nn", "diffusion", "data", "metrics", "evaluation", "tasks", "callbacks", "checkpoint", "cli"},
    "nn": {"diffusion", "data", "metrics", "evaluation", "tasks", "callbacks", "checkpoint", "cli"},
    "diffusion": {"nn", "data", "metrics", "evaluation", "tasks", "callbacks", "checkpoint", "cli", "decay"},
    "data": {"nn", "diffusion", "metrics", "evaluation", "tasks", "callbacks", "checkpoint", "cli", "decay"},
    "metrics": {"nn", "diffusion", "data", "evaluation", "tasks", "callbacks", "checkpoint", "cli", "decay"},
    "evaluation": {"tasks", "callbacks", "cli"},
    "tasks": {"evaluation", "callbacks", "checkpoint", "cli"},
}
WITHOUT_LIGHTNING = (
    "nn",
    "diffusion",
    "metrics",
    "decay",
    "image.py",
    "autoencoder.py",
    "checkpoint",
    "randomness.py",
    "errors.py",
    "processes.py",
    "sampled.py",
    "sampling_options.py",
    "sampled_folder.py",
    "disk.py",
    "plain.py",
    "tensor_files.py",
    "zips.py",
    "download.py",
    "plots.py",
    "threads.py",
    "specs.py",
    "precision.py",
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
