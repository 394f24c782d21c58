"""Builds the documentation site afresh: `python docs/build.py` leaves docs/_build/html, and fails at any warning."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from check import problems
from sphinx.cmd.build import build_main

DOCS = Path(__file__).parent
SITE = DOCS / "_build" / "html"


def own_profile(folder: Path) -> Path:
    """Write and return an IPython folder, in place of the user's: notebooks run alike for all, and quietly."""
    profile = folder / "profile_default"
    profile.mkdir(parents=True)
    (profile / "ipython_kernel_config.py").write_text(
        "c.IPKernelApp.log_level = 'ERROR'  # not of sockets on this host\n"
    )
    return folder


def main() -> int:
    """Build and check the site; return the exit code."""
    for left in (DOCS / "_build", DOCS / "api" / "generated"):
        shutil.rmtree(left, ignore_errors=True)
    os.environ["IPYTHONDIR"] = str(own_profile(DOCS / "_build" / "ipython"))
    scripts = sysconfig.get_path("scripts")  # of this environment, which need not be active
    os.environ["PATH"] = os.pathsep.join([scripts, os.environ["PATH"]])  # notebooks run uvit-decay
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of small networks wait for each other on a busy machine
    os.environ["MATPLOTLIBRC"] = str(DOCS / "figures.mplstyle")  # figures of notebooks, too, suit a dark page
    strict = ["--fail-on-warning", "--nitpicky", "--quiet"]
    code = build_main([*strict, "-d", str(DOCS / "_build" / "doctrees"), str(DOCS), str(SITE)])
    lines = [] if code else problems(SITE)
    print("\n".join(lines) or f"open {SITE / 'index.html'}" * (not code))
    return code or bool(lines)


if __name__ == "__main__":
    sys.exit(main())
