"""Files that come with the package: configurations and checkpoints, wherever it is installed."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = "configs"


def bundled(name: str) -> Path:
    """Return the path of a file that comes with the package, such as configs/digits.yaml.

    In a wheel it is inside of the package, in a checkout beside it.
    """
    inside = PACKAGE / name
    return inside if inside.exists() else PACKAGE.parent / name


def or_bundled(name: str | Path) -> Path:
    """Return `name` as a path if something is there or nothing of the package has this name, else the bundled file."""
    path = Path(name)
    if path.exists() or path.is_absolute() or ".." in path.parts:
        return path
    found = bundled(path.as_posix())
    return found if found.is_file() else path


def find_config(name: str) -> str:
    """Return the path of a configuration: `name` itself if it is one, else that of the package.

    Args:
        name: a file, which comes first, or a bundled configuration as digits, digits.yaml or configs/digits.yaml.
    """
    if Path(name).exists() and not Path(name).is_dir():
        return name
    stem = name.removeprefix(f"{CONFIGS}/").removesuffix(".yaml")
    found = bundled(f"{CONFIGS}/{stem}.yaml")
    return str(found) if "/" not in stem and found.is_file() else name


def config_names() -> list[str]:
    """Return the names of the bundled configurations, sorted."""
    return sorted(path.stem for path in bundled(CONFIGS).glob("*.yaml"))
