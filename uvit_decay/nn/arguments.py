"""Arguments of the networks' constructors: collected for `config`, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from uvit_decay.terminal.errors import UserError, check_numbers, check_whole

Wiring = Literal["official", "decayed"]  # the published network, or the one of the decay's authors
DATA_SIZES = ("image_size", "channels", "num_classes")  # None in a configuration of train.py: as the data


def collect_arguments(scope: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor, given its `locals()` before it assigns other names."""
    return {name: value for name, value in scope.items() if name not in ("self", "__class__")}


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raise a UserError if a size among the arguments of a transformer is out of range."""
    check_data_sizes(config)
    for name in ("patch_size", "dim", "heads"):
        check_whole(1, 2**16, **{name: config[name]})
    check_whole(1, 1000, depth=config["depth"])
    check_numbers("(0, 1000]", mlp_ratio=config["mlp_ratio"])


def check_data_sizes(config: Mapping[str, Any]) -> None:
    """Raise a UserError if one of DATA_SIZES among the arguments of a network is None or out of range."""
    for name in DATA_SIZES:
        if config[name] is None:
            raise UserError(f"{name} must be a number, got None: only train.py takes it from the data")
    check_whole(1, 2**16, image_size=config["image_size"], channels=config["channels"])
    check_whole(0, 2**24, num_classes=config["num_classes"])
