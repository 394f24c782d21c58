"""The words of a command line of train.py: its configurations, and the settings that it gives. No torch is needed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import yaml

from uvit_decay.commands.train.help import list_configs
from uvit_decay.files.validation import YAML_LOADER, flat
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.program import find_config

CONFIG_FLAGS = ("-c", "--config")
PLAIN = re.compile(r"[\w./][\w./-]*")  # a value that is not quoted
DATA = ("data", "data.path", "data.class_path")  # settings that name data
DIGITS = "Digits"  # the data of the default configuration

# Values by flag; a value in braces is read, others are words: {"model.net.dim": "64"}.
Given = Mapping[str, Any]


def check_config(name: str) -> str:
    """Return the path of a configuration, or `name` if it is the text of one; raise a UserError if there is no file."""
    found = find_config(name)
    if not os.path.exists(found) and PLAIN.fullmatch(found):  # a path, not the text of a configuration
        known = ", ".join(list_configs())
        raise UserError(f"--config {name}: File does not exist; configurations of the package are {known}")
    return found


def list_given(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings that flags give, by flag without dashes and without `init_args`.

    Settings before the last --config are left out, because it may replace them.

    Args:
        words: the command line.
    """
    given: dict[str, Any] = {}
    for flag, value in _list_flags(words):
        if flag in CONFIG_FLAGS:
            given.clear()
            continue
        name = flag.lstrip("-").removesuffix("+").replace(".init_args", "")
        with suppress(yaml.YAMLError):  # the parser reports it
            given.update(flat(yaml.load(value, YAML_LOADER) if value.startswith("{") else value, name))
    return given


def _list_flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each flag with its value, or with an empty text or the next word if it has none."""
    for word, after in pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if word.startswith("-"):
            yield flag, value if equals else after


def names_other_data(given: Given) -> bool:
    """Return whether a command line names other data than the digits."""
    named = [str(given[name]) for name in DATA if name in given]
    return any(name.rpartition(".")[2] != DIGITS for name in named)
