"""CITATION.cff says what pyproject.toml and the README say."""

import re
import tomllib

import yaml
from conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_title_version_and_licence_are_those_of_the_package():
    for key, name in (("title", "name"), ("version", "version"), ("license", "license"), ("abstract", "description")):
        assert CITATION[key] == PROJECT[name]


def test_the_fields_that_the_format_requires_are_there():
    assert {"cff-version", "message", "title", "authors"} <= CITATION.keys()
    assert CITATION["cff-version"] == "1.2.0"
    assert {"type", "title", "authors"} <= CITATION["preferred-citation"].keys()


def test_the_paper_is_that_of_the_readme():
    paper, readme = CITATION["preferred-citation"], (ROOT / "README.md").read_text()
    entry = re.search(r"^```bibtex\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[1]
    authors = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
    for value in (paper["title"], str(paper["year"]), paper["collection-title"], authors):
        assert f"{{{value}}}" in entry
    assert paper["url"] == PROJECT["urls"]["Paper"]
    assert paper["url"] in readme
