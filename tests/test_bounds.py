"""The versions that pyproject.toml allows, and those that are installed."""

import tomllib
from importlib.metadata import version

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

from uvit_decay.doctor.environment import COMPROMISED

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = [Requirement(line) for line in PROJECT["dependencies"]]
FOR_TESTS = [Requirement(line) for line in PROJECT["optional-dependencies"]["test"]]


def test_compromised_uploads_of_lightning_are_excluded_and_not_installed():
    (lightning,) = (needed for needed in NEEDED if needed.name == "lightning")
    for number in COMPROMISED:
        assert number not in lightning.specifier
    for name in ("lightning", "pytorch-lightning"):
        assert version(name) not in COMPROMISED


@pytest.mark.parametrize("needed", [*NEEDED, *FOR_TESTS], ids=lambda needed: needed.name)
def test_every_dependency_has_a_lowest_version_and_the_installed_one_is_allowed(needed):
    assert any(clause.operator == ">=" for clause in needed.specifier)
    assert needed.specifier.contains(version(needed.name), prereleases=True)
