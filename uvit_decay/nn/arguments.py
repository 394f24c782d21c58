"""Arguments of the networks' constructors: collected for `config`, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uvit_decay.runtime.errors import check_numbers, check_whole


def collect_arguments(scope: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor, given its `locals()` before it assigns other names."""
    return {name: value for name, value in scope.items() if name not in ("self", "__class__")}


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raise a UserError if a size among the arguments of a network is out of range."""
    for name in ("image_size", "patch_size", "channels", "dim", "heads"):
        check_whole(1, 2**16, **{name: config[name]})
    check_whole(1, 1000, depth=config["depth"])
    check_whole(0, 2**24, num_classes=config["num_classes"])
    check_numbers("(0, 1000]", mlp_ratio=config["mlp_ratio"])
