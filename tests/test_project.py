"""pyproject.toml: the versions that it allows and those that are installed; CITATION.cff says what it says."""

import tomllib
from importlib.metadata import version

import pytest
import yaml
from conftest import ROOT
from packaging.requirements import Requirement

COMPROMISED = ("2.6.2", "2.6.3")  # uploads of lightning that ran a stranger's code
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


def test_the_citation_is_of_this_package_and_of_the_paper_of_the_readme():
    citation, readme = yaml.safe_load((ROOT / "CITATION.cff").read_text()), (ROOT / "README.md").read_text()
    for key, name in (("title", "name"), ("version", "version"), ("license", "license"), ("abstract", "description")):
        assert citation[key] == PROJECT[name]
    paper = citation["preferred-citation"]
    assert f"{{{paper['title']}}}" in readme
    assert paper["url"] == PROJECT["urls"]["Paper"]
    assert paper["url"] in readme
