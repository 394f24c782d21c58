"""The wheel, built from the source distribution: what is inside, and that it works in an empty folder."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from conftest import ROOT
from PIL import Image

SHIPPED = {
    f"checkpoints/{name}.safetensors"
    for name in ("cifar10", "digits", "mae_cifar10", "mae_cifar10_plain", "resnet_cifar10")
}
SHIPPED |= {"checkpoints/cards.yaml"}
SOURCES = ("uvit_decay", "configs", "checkpoints", "docs", "benchmarks", "tests", ".ci")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = """
import os, sys
from setuptools.build_meta import build_sdist, build_wheel
print(build_wheel(sys.argv[2]) if sys.argv[1] == "wheel" else build_sdist(sys.argv[2]))
"""
USE = """
import sys
from uvit_decay.__main__ import main
sys.argv = ["uvit-decay", "sample", "--help"]
try:
    main()
except SystemExit:
    assert "torch" not in sys.modules
sys.argv = ["uvit-decay", "sample", "--num", "4", "--steps", "2"]
main()
"""


def built(kind: str, source: Path, target: Path) -> Path:
    """Build a wheel or a source distribution offline, with the setuptools of this environment."""
    target.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, kind, str(target)]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return target / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Return the unpacked source distribution."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    for path in [path for path in ROOT.iterdir() if path.is_file()]:
        shutil.copy(path, folder)
    with tarfile.open(built("sdist", folder, folder / "dist")) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in Python before 3.11.4
        archive.extractall(folder / "unpacked")
    return next((folder / "unpacked").iterdir())


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    """Return the unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(built("wheel", source, folder / "dist")) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def files(folder: Path, pattern: str) -> set[str]:
    found = [path for path in folder.rglob(pattern) if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder).as_posix() for path in found}


def test_the_source_distribution_has_what_a_checkout_has(source):
    for place in SOURCES:
        assert files(ROOT / place, "*.py") <= files(source / place, "*.py")
    for name in ("train.py", "sample.py", "evaluate.py", "README.md", "LICENSE", "CITATION.cff", "Makefile"):
        assert (source / name).exists()
    assert files(ROOT / "docs", "*.md") <= files(source / "docs", "*.md")


def test_the_wheel_has_all_modules_and_their_data_and_nothing_else(wheel):
    package = wheel / "uvit_decay"
    ours = files(ROOT / "uvit_decay", "*.*") | {f"configs/{name}" for name in files(ROOT / "configs", "*.yaml")}
    assert files(package, "*.*") == ours | SHIPPED
    assert {path.name for path in wheel.iterdir()} == {"uvit_decay", f"uvit_decay-{PROJECT['version']}.dist-info"}
    (script,) = Distribution.at(next(wheel.glob("*.dist-info"))).entry_points
    assert (script.name, script.value) == ("uvit-decay", "uvit_decay.__main__:main")


def test_the_wheel_samples_in_an_empty_folder(wheel, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(wheel), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", USE]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "usage: uvit-decay sample" in result.stdout
    assert "torchrun --nproc_per_node P -m -- uvit_decay sample --num" in result.stdout
    assert "sample.py" not in result.stdout
    assert Image.open(tmp_path / "samples.png").size[0] == 4 * 68 + 4
