"""Checks of a command line of train.py before Lightning and torch are imported, which takes seconds.

They refuse only what the parser would refuse, too, and leave to it whatever they cannot tell. A flag of a class is a
name that is written in the source of the class: a name that is written nowhere is no flag.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from uvit_decay.commands.train.help import FIT_FLAGS, list_configs
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import check_images_exist, check_is_file
from uvit_decay.runtime.program import NUMBERS, PACKAGE, find_config
from uvit_decay.runtime.suggestions import did_you_mean

CONFIG_FLAGS = ("-c", "--config")
FLAG = re.compile(r"--(\w[\w.]*)\+?(=.*)?", re.DOTALL)
OURS = ("resume", "trust", "minutes", "model", "data", "trainer")  # groups and flags beside Lightning's
OF_JSONARGPARSE = ("help", "print_config", "print_shtab")
OF_CLASSES = ("model", "data")  # groups of flags that depend on classes
OF_ALL_CLASSES = ("class_path", "init_args", "help")
ANYTHING = ("dict_kwargs", "arguments")  # whatever follows them is a key of a dictionary
CLASS = re.compile(r"\b[A-Z]\w+")
FOREIGN = re.compile(r"\b(torch|lightning)\.")  # classes beside ours that a configuration may name without --trust
PARAMETER = re.compile(r"\b(\w+):")
PLAIN = re.compile(r"[\w./][\w./-]*")  # a value that is not quoted
NOT_PATHS = ("null", "None", "last", "auto")
DATA = re.compile(r"^data:\n  class_path: (\S+)", re.MULTILINE)
FOLDERS = ("Images", "AugmentedImages")  # data whose path must exist


def check_words(words: Sequence[str]) -> None:
    """Raise a UserError for a missing configuration, an unknown flag, or a missing checkpoint or folder of images.

    Args:
        words: the words after the subcommand, with underscores in the names of flags.
    """
    configs = list(_read_configs(words))
    text = "\n".join(configs)
    trusts = any(word.partition("=")[0] == "--trust" for word in words)
    knows_classes = not trusts and not FOREIGN.search(" ".join([text, *words]))  # all of them are ours
    for word in words:
        if flag := FLAG.fullmatch(word):
            _check_flag(flag[1])
            if knows_classes:
                _check_class_flag(flag[1], " ".join([text, *words]))
    # --print_config reads no paths. Of several processes, one that ends here would keep the others waiting for it.
    is_launched = any(name in os.environ for name in NUMBERS)
    if not (is_launched or any(word.startswith("--print_config") for word in words)):
        _check_checkpoint(words)
        _check_images(words, configs)


def check_config(name: str) -> str:
    """Return the path of a configuration, or `name` if it is the text of one; raise a UserError if there is no file."""
    found = find_config(name)
    if not os.path.exists(found) and PLAIN.fullmatch(found):  # a path, not the text of a configuration
        known = ", ".join(list_configs())
        raise UserError(f"--config {name}: File does not exist; configurations of the package are {known}")
    return found


def sets_argument(words: Sequence[str], name: str) -> bool:
    """Return whether a flag sets an argument, such as model.net.dim; the flag may have `init_args` or not."""
    path = name.replace(".", r"\.(init_args\.)?")
    flag = re.compile(rf"--{path}(=.*)?", re.DOTALL)
    return any(map(flag.fullmatch, words))


def _read_configs(words: Sequence[str]) -> Iterator[str]:
    """Yield the text of each configuration; one that is no regular file, or no text, is left to the parser."""
    for flag, value in _pairs(words):
        if flag in CONFIG_FLAGS:
            path = Path(check_config(value))
            if os.path.isfile(path) and path.stat().st_size < 2**20:
                yield path.read_bytes().decode(errors="replace")


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags that have a value, and the value."""
    for word, after in pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if word.startswith("-"):
            yield flag, value if equals else after


def _check_flag(name: str) -> None:
    """Raise a UserError if a flag is neither of Lightning's nor of a class."""
    group, *names = name.split(".")
    trainer = _trainer_flags()
    is_known = group in (*OURS, *OF_JSONARGPARSE, *_lightning_names())
    if group == "trainer" and names and trainer:
        is_known = names[0] in trainer
    if not is_known:
        known = [*(f"--trainer.{argument}" for argument in trainer), *FIT_FLAGS]
        raise UserError(f"unknown option --{name}{did_you_mean(f'--{name}', known)}")


def _check_class_flag(name: str, settings: str) -> None:
    """Raise a UserError if no class has the argument that a flag of a class names.

    If only the parser knows which argument was probably meant, the flag is left to it.

    Args:
        name: the flag, without dashes.
        settings: the text that names the classes: configurations and the words of the command line.
    """
    group, *names = name.split(".")
    if group not in OF_CLASSES or f"--{name}" in FIT_FLAGS:
        return
    for i, part in enumerate(names):
        if part in ANYTHING:
            return
        if part in OF_ALL_CLASSES or part in _annotated_names():
            continue
        before = ".".join(["--" + group, *names[:i]])
        hint = did_you_mean(f"--{name}", FIT_FLAGS)
        if not hint and group == "model":
            kinds = set(CLASS.findall(settings))
            if i:
                kinds |= _types_of(names[i - 1])
            known = [f"{before}.{argument}" for kind in sorted(kinds) for argument in _arguments(kind)]
            hint = did_you_mean(f"--{name}", known)
        anything = [f"{before}.{argument}" for argument in _annotated_names()]
        if hint or not did_you_mean(f"--{name}", anything):
            raise UserError(f"unknown option --{name}{hint}")
        return


@cache
def _sources() -> tuple[str, ...]:
    """Return the text of all modules of the package."""
    return tuple(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))


@cache
def _annotated_names() -> frozenset[str]:
    """Return all names that the package annotates, among them the parameters of all its classes."""
    names: set[str] = set()
    for text in _sources():
        names.update(PARAMETER.findall(text))
    return frozenset(names)


@cache
def _types_of(name: str) -> frozenset[str]:
    """Return the classes that the package annotates a name with, such as Optimization for `optim`."""
    annotation = re.compile(rf"\b{name}: ([A-Z]\w+)")
    types: set[str] = set()
    for text in _sources():
        types.update(annotation.findall(text))
    return frozenset(types)


@cache
def _arguments(kind: str) -> tuple[str, ...]:
    """Return the arguments of the constructor of a class of the package; none if there is no such class."""
    for text in _sources():
        if f"\nclass {kind}(" in text or f"\nclass {kind}:" in text:
            return _constructor_arguments(text, kind)
    return ()


def _constructor_arguments(text: str, kind: str) -> tuple[str, ...]:
    """Return the arguments of the constructor of a class, or the fields of a dataclass, in the text of a module."""
    for node in ast.parse(text).body:
        if not (isinstance(node, ast.ClassDef) and node.name == kind):
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                return tuple(argument.arg for argument in (*method.args.args[1:], *method.args.kwonlyargs))
        return tuple(field.target.id for field in node.body if isinstance(field, ast.AnnAssign))
    return ()


def _read_lightning(name: str) -> str:
    """Return the source of a module of lightning.pytorch, such as cli.py, without importing it."""
    (folder,) = find_spec("lightning").submodule_search_locations
    return Path(folder, "pytorch", name).read_text("utf-8")


@cache
def _lightning_names() -> frozenset[str]:
    """Return the names by which LightningCLI and the methods of the trainer name their flags, among others."""
    quoted = re.findall(r"[\"'](?:--)?(\w+)", _read_lightning("cli.py"))
    return frozenset(quoted + PARAMETER.findall(_read_lightning("trainer/trainer.py")))


@cache
def _trainer_flags() -> tuple[str, ...]:
    """Return the arguments of Lightning's Trainer, in order."""
    return _constructor_arguments(_read_lightning("trainer/trainer.py"), "Trainer")


def _find_path(words: Sequence[str], wanted: str) -> str | None:
    """Return the path that a flag gives; None if it gives none, or a later configuration may give another one."""
    found = None
    for flag, value in _pairs(words):
        if flag in CONFIG_FLAGS:
            found = None
        elif flag == wanted:
            found = value if PLAIN.fullmatch(value) and value not in NOT_PATHS else None
    return found


def _check_checkpoint(words: Sequence[str]) -> None:
    """Raise a UserError if --ckpt_path names a file that does not exist."""
    path = _find_path(words, "--ckpt_path")
    if path is not None and not os.path.exists(path):
        check_is_file(Path(path))


def _check_images(words: Sequence[str], configs: Sequence[str]) -> None:
    """Raise a UserError if --data.path does not exist, and the data are images in files; see `check_words`."""
    path = _find_path(words, "--data.path")
    kinds = [value for flag, value in _pairs(words) if flag == "--data"]
    if not kinds and len(configs) == 1:  # the data of several ones depend on their order
        kinds = DATA.findall(configs[0])
    if path is not None and kinds and kinds[-1].rpartition(".")[2] in FOLDERS:
        check_images_exist(path)
