"""How configurations and flags of train.py are read: bounded in size and in what they may name; errors are one line."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from jsonargparse import Namespace, get_loader, set_dumper, set_loader, set_parsing_settings
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import ParallelStrategy

import uvit_decay
from uvit_decay import diffusion
from uvit_decay.commands.train.help import FIT_FLAGS
from uvit_decay.commands.train.messages import NAMEABLE, PRECISIONS, describe_error
from uvit_decay.commands.train.words import CONFIG_FLAGS, check_config
from uvit_decay.files.instantiate import GONE, NOT_NULL, current_path
from uvit_decay.files.validation import YAML_LOADER, parse, read_text
from uvit_decay.runtime.distributed import BY_HAND, find_launcher
from uvit_decay.runtime.precision import FLOAT16
from uvit_decay.terminal.errors import MOST_SEED, UserError, check_numbers, check_whole, explain

CALLERS = "lightning.pytorch.callbacks.lambda_function"  # its class calls any function that it is given
YAML = get_loader("yaml")
OLD_NUMBER = re.compile(r"[-+]?0[0-7_]+|.*:.*")  # of YAML 1.1 alone: 010 is 8, 1:00 is 60
YAML_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # jsonargparse's writes the same text and takes longer
SHARDING = ("fsdp", "deepspeed", "modelparallel")  # words in the names of Lightning's strategies that shard
READ_NULL = re.compile(r"=None$")
SHORTENED = {"uvit_decay": uvit_decay.MODULES, "uvit_decay.diffusion": diffusion.MODULES}  # packages with short paths
SHORT_PATH = re.compile(r"(?<=class_path: )(uvit_decay(?:\.diffusion)?)\.([A-Za-z]+)$", re.MULTILINE)
SUPPORTED = ("None", "32", "32-true", "bf16-mixed", FLOAT16)  # precisions

CKPT_PATH = (
    "checkpoint to resume from: a file; last, the newest one of the experiment; or auto, the newest one of a run with "
    "these settings, without which a new run starts"
)


class TrainParser(LightningArgumentParser):
    """A parser that reports a wrong option or config key in one line instead of a page of usage.

    An abbreviated option is wrong: it could become ambiguous, or mean another setting, in a later version.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        flags = list(self._option_string_actions)
        # Without --seed_everything this is the parser of a class, which parses a part of a flag.
        common = FIT_FLAGS if "--seed_everything" in flags else ()
        raise UserError(describe_error(message, flags, self._actions, common)) from ex

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Namespace:
        """Parse flags, with null in flags of nested classes such as --model.net.image_size.

        jsonargparse reads their value, and gives the rest of the flag to the parser of the class: null as "None".
        """
        is_nested = "--config" not in self._option_string_actions
        if args is not None and is_nested:
            args = [READ_NULL.sub("=null", word) for word in args]
        return super().parse_args(args, *others, **options)

    def dump(self, *args: Any, **options: Any) -> str:
        """Return the text of a configuration, with the class paths that all versions write.

        The parser itself takes the shortest path that an object can be imported by: `uvit_decay.UViT`. Runs that are
        resumed, compared and reproduced have `uvit_decay.nn.UViT`. Values are not checked again: parsing has checked
        them, and the check takes most of the time of a dump, of which a launch has several.
        """
        text = super().dump(*args, **{**options, "skip_validation": True})
        return SHORT_PATH.sub(_name_stored_path, text)

    def add_method_arguments(self, *args: Any, **options: Any) -> list[str]:
        """Add the arguments of a method of the trainer, with our own words for --ckpt_path."""
        added = super().add_method_arguments(*args, **options)
        for action in self._actions:
            if action.dest == "ckpt_path":
                action.help = CKPT_PATH
        return added


def _name_stored_path(found: re.Match[str]) -> str:
    """Return a class path of SHORT_PATH as configurations have it: by its subpackage, a noise path by its module."""
    package, name = found[1], found[2]
    module = SHORTENED[package].get(name)
    if module is None:
        return found[0]
    return f"{package}.{module}.{name}"


def _load(text: str) -> Any:
    """Load YAML as jsonargparse does, with the class paths of today."""
    return _rename_classes(YAML(text))


def _construct_number(kind: str, loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    """Return a number of YAML 1.2 as PyYAML reads an "int" or "float"; an old one stays a text."""
    return node.value if OLD_NUMBER.fullmatch(node.value) else getattr(loader, f"construct_yaml_{kind}")(node)


def _dump(values: Any) -> str:
    """Return YAML as jsonargparse writes it; a launch writes dozens of texts."""
    return yaml.dump(values, Dumper=YAML_DUMPER, default_flow_style=False, allow_unicode=True, sort_keys=False)


def _rename_classes(value: Any) -> Any:
    """Return the settings of a configuration with the class paths of today, see `current_path`."""
    if isinstance(value, list):
        return [_rename_classes(item) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = {key: _rename_classes(item) for key, item in value.items()}
    name, arguments = renamed.get("class_path"), renamed.get("init_args")
    if isinstance(name, str):
        renamed["class_path"] = current_path(name)
    if isinstance(name, str) and isinstance(arguments, dict):
        for argument in GONE.get(name, ()):
            arguments.pop(argument, None)
        for argument in NOT_NULL.get(name, ()):
            if arguments.get(argument, 0) is None:
                del arguments[argument]
    return renamed


def limit(trusted: list[str]) -> None:
    """Bound the size of configurations, and let them name only NAMEABLE and these modules, classes and functions.

    Numbers are read as they are written: 1:00 is a text, and so refused where a number is expected.
    """
    for kind in ("int", "float"):  # jsonargparse's loader inherits the constructors
        yaml.add_constructor(f"tag:yaml.org,2002:{kind}", partial(_construct_number, kind), YAML_LOADER)
    set_dumper("yaml", _dump)
    set_loader("yaml", _load, (yaml.YAMLError, ValueError, RecursionError))
    with explain(f"--trust {' '.join(trusted)}", ValueError):
        set_parsing_settings(
            import_path_denylist=["*", CALLERS],
            import_path_allowlist=[*NAMEABLE, *trusted],
            instantiate_subclass_spec_in_any=False,
        )


def locate(args: Sequence[str]) -> list[str]:
    """Return the words of a command line with the path of each --config, which may be the name of a bundled one."""
    words = []
    for before, word in pairwise(["", *args]):
        flag, equals, name = word.partition("=")
        if before in CONFIG_FLAGS:
            word = _find_checked_config(word)
        elif flag in CONFIG_FLAGS and equals:
            path = _find_checked_config(name)
            word = f"{flag}={path}"
        words.append(word)
    return words


def _find_checked_config(name: str) -> str:
    """Return the path of a configuration, which holds settings, or `name` if it is the text of one."""
    found = check_config(name)
    path = Path(found)
    if os.path.exists(found) and not path.is_fifo():  # a pipe can be read only once
        settings = parse(read_text(path, 2**20), path, YAML)
        if not isinstance(settings, dict):
            raise UserError(f"{path} holds no settings, which are a mapping such as `seed_everything: 0`")
    return found


def check_values(config: Namespace) -> None:
    """Raise a UserError for a value of a run's configuration that Lightning would reject only later, or not at all."""
    check_whole(0, MOST_SEED, seed_everything=config.seed_everything)
    if config.minutes is not None:
        check_numbers("(0, inf)", minutes=config.minutes)
    trainer = config.trainer
    if not isinstance(trainer, Namespace):
        raise UserError(f"takes settings, such as max_steps: 100, got {trainer!r}", argument="trainer")
    if trainer.overfit_batches:
        instead = "give --data.path a folder of few images, or set --trainer.limit_train_batches"
        raise UserError(f"--trainer.overfit_batches {trainer.overfit_batches}: {instead}")
    strategy = trainer.strategy
    shards = any(word in str(strategy).lower() for word in SHARDING)
    if shards and strategy != "fsdp":
        raise UserError(f"--trainer.strategy {strategy}: only fsdp shards here; ddp does not shard")
    if str(trainer.precision) not in SUPPORTED:
        raise UserError(f"--trainer.precision takes {PRECISIONS}, got {trainer.precision}")
    on_cuda = trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if trainer.precision == FLOAT16 and not on_cuda:
        raise UserError(f"--trainer.precision {FLOAT16} needs a CUDA GPU: set 32-true or bf16-mixed")


def check_nodes(trainer: Trainer) -> None:
    """Raise a UserError if the trainer counts other processes than a launcher has started, or cannot find its nodes."""
    started, launcher = find_launcher()
    strategy = trainer.strategy
    outside = isinstance(strategy, ParallelStrategy) and strategy.cluster_environment.creates_processes_externally
    counted = trainer.num_nodes * trainer.num_devices  # torchrun's environment has its own `world_size`
    flags = f"--trainer.num_nodes {trainer.num_nodes} x {trainer.num_devices} devices"
    if trainer.num_nodes > 1 and not outside:
        unset = [name for name in BY_HAND if name not in os.environ]
        if unset:
            raise UserError(f"{flags}: set {', '.join(unset)} on every node, or use a launcher (docs/machines.md)")
    elif started != counted and (outside or started > 1):
        raise UserError(
            f"{launcher} has started {started} processes, the trainer counts {counted} ({flags}): set "
            "--trainer.num_nodes to the nodes, and --trainer.devices to the processes of each"
        )
