"""Builds the documentation site afresh: `python docs/build.py` leaves docs/_build/html, and fails at any warning."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from check import problems
from sphinx.cmd.build import build_main

DOCS = Path(__file__).parent
SITE = DOCS / "_build" / "html"


def main() -> int:
    """Build and check the site; return the exit code."""
    for left in (DOCS / "_build", DOCS / "api" / "generated"):
        shutil.rmtree(left, ignore_errors=True)
    strict = ["--fail-on-warning", "--nitpicky", "--quiet"]
    code = build_main([*strict, "-d", str(DOCS / "_build" / "doctrees"), str(DOCS), str(SITE)])
    lines = [] if code else problems(SITE)
    print("\n".join(lines) or f"open {SITE / 'index.html'}" * (not code))
    return code or bool(lines)


if __name__ == "__main__":
    sys.exit(main())
