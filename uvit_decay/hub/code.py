"""The Python files of a folder of diffusers: one for the pipeline and one for the denoiser, named in model_index.json.

diffusers loads a class that is not its own from a single file: `<file>.py` for the pipeline, `<component>/<file>.py`
for a component. It copies all of them flat into one cache folder and runs them from there, so that files with different
contents must have different names: these are of the class and of the version of this package.
"""

import inspect
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from uvit_decay.checkpoint.folders import INDEX

HOME = "uvit_decay"
COMPONENT = "denoiser"


class CodeFile(NamedTuple):
    """A file of Python with a class: the class's name, the file's name without .py, and its text."""

    kind: str
    name: str
    text: str


def code_of(kind: type) -> CodeFile:
    """Return a file that gives diffusers the class `kind`: an import from this package, where that has the class.

    A class of a self-contained folder is in a file of its own already, and that file is returned.
    """
    module = kind.__module__
    if module.split(".")[0] == HOME:
        return CodeFile(kind.__name__, file_name(kind), shim(module, kind.__name__))
    return CodeFile(kind.__name__, module.rpartition(".")[2], inspect.getsource(sys.modules[module]))


def file_name(kind: type) -> str:
    """Return the name, without .py, of a file with this class of this version."""
    return "_".join([HOME, kind.__name__.lower(), *version(HOME).split(".")])


def shim(module: str, name: str) -> str:
    """Return a file that imports a class of this package."""
    return f'"""{name} of {HOME} {version(HOME)}, which must be installed."""\n\nfrom {module} import {name}\n'


def place(folder: Path, pipeline: CodeFile, denoiser: CodeFile) -> None:
    """Write both files into a folder of diffusers, in place of those that are there, and name them in its index."""
    for old in (*folder.glob(f"{HOME}_*.py"), *folder.glob(f"{COMPONENT}/{HOME}_*.py")):
        old.unlink()
    (folder / f"{pipeline.name}.py").write_text(pipeline.text)
    (folder / COMPONENT / f"{denoiser.name}.py").write_text(denoiser.text)
    index = json.loads((folder / INDEX).read_text())
    index |= {"_class_name": [pipeline.name, pipeline.kind], COMPONENT: [denoiser.name, denoiser.kind]}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
