"""How this process was started: by a script, the package or a launcher; importing this needs no torch."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

PROGRAM = "uvit-decay"
MODULE = "uvit_decay"  # python -m uvit_decay, for launchers
SCRIPT = re.compile(r"(?<![\w/.])(python |-- |\\\n *)?(train|sample|evaluate)\.py\b")


def quiet_libraries() -> None:
    """Suppress output of libraries that no user can act on; to be called before they are imported.

    If standard error is not a terminal, progress bars are off: in a log file each frame of a bar is text. Lines of our
    own show the progress there.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    # "No CUDA runtime is found, using CUDA_HOME": nothing is compiled for CUDA without a GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def localise(text: str) -> str:
    """Return a text in which names of scripts, such as `python train.py`, are replaced by commands of this program.

    The text stays as it is if this process was started by a script. A script after `-- ` or at the beginning of a
    continued line is started by a launcher, which takes a module.
    """
    program = Path(sys.argv[0])  # uvit-decay, or __main__.py of python -m uvit_decay
    is_ours = program.name in (PROGRAM, MODULE) or program.parts[-2:] == (MODULE, "__main__.py")
    return SCRIPT.sub(_name_command, text) if is_ours else text


def _name_command(script: re.Match[str]) -> str:
    before = script[1] or ""
    name = script[2]
    if before in ("", "python "):
        return f"{PROGRAM} {name}"
    if before == "-- ":
        return f"-m -- {MODULE} {name}"
    return f"{before}-m {MODULE} {name}"


def lazy(
    package: str, modules: Mapping[str, str], together: bool = False
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports its public names when they are first used.

    Args:
        package: its full name.
        modules: public names and the modules that have them, as relative imports write them without the first dot. No
            name may be the name of a module of the package: an import of the module would hide it.
        together: import all names with the first one.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        wanted = modules if together else {name: modules[name]}
        found = {}
        for key, module in wanted.items():
            found[key] = getattr(import_module(f".{module}", package), key)
        vars(sys.modules[package]).update(found)
        return found[name]

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names


PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = "configs"
DEFAULT_CONFIG = f"{CONFIGS}/digits.yaml"  # of train.py without --config
PICTURES_CONFIG = f"{CONFIGS}/pictures.yaml"  # of train.py without --config, if the command line names data


def find_bundled(name: str) -> Path:
    """Return the path of a file that comes with the package, such as configs/digits.yaml.

    In a wheel the file is inside the package, in a checkout beside it.
    """
    inside = PACKAGE / name
    return inside if os.path.exists(inside) else PACKAGE.parent / name  # False for a text that cannot be a path


def or_bundled(name: str | Path) -> Path:
    """Return `name` as a path if it exists or there is no bundled file of this name, otherwise the bundled file."""
    path = Path(name)
    if path.exists():
        return path
    found = find_bundled(path.as_posix())
    return found if found.is_file() and ".." not in path.parts else path


def find_config(name: str) -> str:
    """Return the path of a configuration: `name` itself if it is a file, otherwise the bundled configuration.

    Args:
        name: a file, or a bundled configuration as digits, digits.yaml or configs/digits.yaml.
    """
    if os.path.exists(name) and not os.path.isdir(name):  # False also for a text that is too long for a path
        return name
    stem = name.removeprefix(f"{CONFIGS}/").removesuffix(".yaml")
    found = find_bundled(f"{CONFIGS}/{stem}.yaml")
    return str(found) if "/" not in stem and os.path.isfile(found) else name
