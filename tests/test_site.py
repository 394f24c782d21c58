"""The documentation site: nothing that its builds need a second look for, and the check that each build ends with."""

import json
import re
import runpy

import pytest
from conftest import ROOT

DOCS = ROOT / "docs"
CONTENTS = re.findall(r"^(\w+(?:/\w+)*)$", (DOCS / "index.md").read_text(), re.MULTILINE)


@pytest.fixture
def check():
    """Return the function of docs/check.py that looks for problems."""
    return runpy.run_path(str(DOCS / "check.py"))["problems"]


def test_every_page_and_notebook_is_in_the_contents():
    pages = [*DOCS.glob("*.md"), *DOCS.glob("api/*.md"), *DOCS.glob("notebooks/*.ipynb")]
    names = {str(page.relative_to(DOCS).with_suffix("")) for page in pages}
    assert set(CONTENTS) == names - {"index", "LOG", "CONTRIBUTING"}  # for developers, outside the navigation
    assert len(CONTENTS) == len(set(CONTENTS))


def test_notebooks_are_kept_without_outputs_and_with_ids():
    """A failure of a line with ! would go unnoticed in the build, of a %%bash cell it does not."""
    for notebook in DOCS.glob("notebooks/*.ipynb"):
        content = json.loads(notebook.read_text())
        assert (content["nbformat"], content["nbformat_minor"]) >= (4, 5)
        ids = [cell["id"] for cell in content["cells"]]
        assert len(set(ids)) == len(ids)
        for cell in content["cells"]:
            assert not cell.get("outputs")
            assert not cell.get("execution_count")
            if cell["cell_type"] == "code":
                assert not any(line.startswith("!") for line in cell["source"])


def test_links_that_lead_to_files_and_places_are_fine(check, tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#x"></a><a href="https://example.org"></a><img src="data:,">')
    canonical = '<link rel="canonical" href="https://example.org">'
    (tmp_path / "b.html").write_text(f'<h1 id="x"></h1><a href="#x"></a>{canonical}')
    assert check(tmp_path) == []


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ('<script src="https://cdn.example.org/x.js"></script>', "loads https://cdn.example.org/x.js"),
        ('<style>@import "https://example.org/x.css";</style>', "loads https://example.org/x.css"),
        ('<img srcset="http://example.org/x.png 2x">', "loads http://example.org/x.png"),
        ('<a href="b.html">', "b.html leads nowhere"),
        ('<a href="#x">', "#x leads nowhere"),
    ],
)
def test_links_to_nothing_and_assets_of_others_are_found(check, tmp_path, page, problem):
    (tmp_path / "a.html").write_text(page)
    assert [line.partition(": ")[2] for line in check(tmp_path)] == [problem]
