"""How configurations and flags of train.py are read: bounded in size and in what they may name; errors are one line."""

from __future__ import annotations

import os
import pkgutil
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from jsonargparse import Namespace, get_loader, set_loader, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities import rank_zero_info

import uvit_decay
from uvit_decay import diffusion
from uvit_decay.commands.fit_help import FIT_FLAGS, list_configs
from uvit_decay.commands.messages import NAMEABLE, PRECISIONS, TAKEN, describe_error
from uvit_decay.data import Digits
from uvit_decay.data.latents.module import Latents
from uvit_decay.decay import DEPTH_ATTENTION, SHORTCUTS
from uvit_decay.runtime.errors import MOST_SEED, UserError, check_whole, explain
from uvit_decay.runtime.instantiate import current_path
from uvit_decay.runtime.program import find_config
from uvit_decay.runtime.validation import check_size, parse, read_text

CALLERS = "lightning.pytorch.callbacks.lambda_function"  # its class calls any function that it is given
YAML = get_loader("yaml")
SHARDING = ("fsdp", "deepspeed", "modelparallel")  # words in the names of Lightning's strategies that shard
FLAGS = ("-c", "--config")
CLIP_FLAG = re.compile(r"--model(\.init_args)?\.sampling(\.init_args)?(\.clip\b|[ =]\S*clip\b)")
SHORTENED = {"uvit_decay": uvit_decay.MODULES, "uvit_decay.diffusion": diffusion.MODULES}  # packages with short paths
SHORT_PATH = re.compile(r"(?<=class_path: )(uvit_decay(?:\.diffusion)?)\.([A-Za-z]+)$", re.MULTILINE)
REFUSED = {  # flags of the trainer that do not do here what they say -> what to use
    "reload_dataloaders_every_n_epochs": "it would repeat epoch 0; every epoch has an order of its own without it",
    "overfit_batches": "give --data.path a folder of few images, or set --trainer.limit_train_batches",
}
LEAST = {"check_val_every_n_epoch": 1, "log_every_n_steps": 0, "min_steps": 0, "min_epochs": 0, "gradient_clip_val": 0}


CKPT_PATH = (
    "checkpoint to resume from: a file; last, the newest one of the experiment; or auto, the newest one of a run with "
    "these settings, without which a new run starts"
)


class Parser(LightningArgumentParser):
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

    def dump(self, *args: Any, **options: Any) -> str:
        """Return the text of a configuration, with the class paths that all versions write.

        The parser itself takes the shortest path that an object can be imported by: `uvit_decay.UViT`. Runs that are
        resumed, compared and reproduced have `uvit_decay.nn.UViT`.
        """
        return SHORT_PATH.sub(_name_stored_path, super().dump(*args, **options))

    def add_method_arguments(self, *args: Any, **options: Any) -> list[str]:
        """Add the arguments of a method of the trainer, with our own words for --ckpt_path."""
        added = super().add_method_arguments(*args, **options)
        for action in self._actions:
            if action.dest == "ckpt_path":
                action.help = CKPT_PATH
        return added


def _name_stored_path(found: re.Match[str]) -> str:
    """Return a class path of SHORT_PATH as configurations have it: by its room, or for a noise path by its module."""
    package, name = found[1], found[2]
    module = SHORTENED[package].get(name)
    if module is None:
        return found[0]
    return f"{package}.{module}.{name}"


def _load(text: str) -> Any:
    """Load YAML as jsonargparse does, after a check of its size with all aliases followed."""
    check_size(yaml.compose(text, yaml.SafeLoader))  # before aliases are followed
    return _rename_classes(YAML(text))


def _rename_classes(value: Any) -> Any:
    """Return the settings of a configuration with the class paths of today, see `current_path`."""
    if isinstance(value, list):
        return [_rename_classes(item) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = {key: _rename_classes(item) for key, item in value.items()}
    if isinstance(renamed.get("class_path"), str):
        renamed["class_path"] = current_path(renamed["class_path"])
    return renamed


def limit(trusted: list[str]) -> None:
    """Bound the size of configurations, and let them name only NAMEABLE and these modules, classes and functions."""
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
        if before in FLAGS:
            word = _find_checked_config(word)
        elif flag in FLAGS and equals:
            path = _find_checked_config(name)
            word = f"{flag}={path}"
        words.append(word)
    return words


def _find_checked_config(name: str) -> str:
    """Return the path of a configuration, or `name` if it is the text of one.

    Raises:
        UserError: there is no such file, or it holds no settings.
    """
    found = find_config(name)
    path = Path(found)
    if os.path.exists(found):
        if not path.is_fifo():  # a pipe can be read only once
            settings = parse(read_text(path, 2**20), path, _load)
            if not isinstance(settings, dict):
                raise UserError(f"{path} holds no settings, which are a mapping such as `seed_everything: 0`")
    elif re.fullmatch(r"[\w./-]+", found):  # a path, not the text of a configuration
        known = ", ".join(list_configs())
        raise UserError(f"--config {name}: File does not exist; configurations of the package are {known}")
    return found


def unclip_latents(config: Namespace, words: Sequence[str]) -> None:
    """Switch off `sampling.clip` of a configuration if the data are latents, unless the command line sets it.

    Clipping to [-1, 1] is for pixels; latents of unit variance exceed this range.

    Args:
        config: settings of a run; changed in place.
        words: the command line.
    """
    sampling = config.model.init_args.get("sampling")
    if not sampling or not sampling.get("clip") or not _is_latents(config.data.class_path):
        return
    if CLIP_FLAG.search(" ".join(words)):
        rank_zero_info("warning: --model.sampling.clip clamps latents to [-1, 1] in sampling; it is meant for pixels")
        return
    sampling.clip = None
    rank_zero_info("sampling.clip of the configuration is off: it is for pixels, --model.sampling.clip true forces it")


def _is_latents(class_path: str) -> bool:
    """Return whether a data module in a parsed configuration reads latents."""
    return issubclass(pkgutil.resolve_name(class_path), Latents)


def reset_alpha_min(config: Namespace, words: Sequence[str]) -> None:
    """Set alpha_min to 1 for a schedule of the command line that has none, unless the command line sets it.

    The alpha_min of a configuration belongs to the schedule of this configuration.

    Args:
        config: the run's configuration, in which `alpha_min` of the network is replaced.
        words: the command line.
    """
    sets_schedule = _sets_network_argument(words, "schedule")
    sets_alpha_min = _sets_network_argument(words, "alpha_min")
    if not sets_schedule or sets_alpha_min:
        return
    arguments = config.model.get("init_args.net.init_args")
    if arguments is None or arguments.get("alpha_min") in (None, 1.0):
        return
    schedule = arguments.get("schedule")
    if isinstance(schedule, str) and _lacks_alpha_min(schedule):
        arguments["alpha_min"] = 1.0
        rank_zero_info(f"--model.net.alpha_min 1, because schedule {schedule} has no alpha_min")


def _lacks_alpha_min(schedule: str) -> bool:
    """Return whether a schedule is known to have no alpha_min; False for unknown names."""
    if schedule in DEPTH_ATTENTION:
        return True
    kind = SHORTCUTS.get(schedule)
    return kind is not None and not kind.falls


def _sets_network_argument(words: Sequence[str], name: str) -> bool:
    """Return whether a flag of the command line sets this argument of the network."""
    flag = re.compile(rf"--model\.(init_args\.)?net\.(init_args\.)?{name}(=.*)?", re.DOTALL)
    return any(flag.fullmatch(word) for word in words)


def take_network_size(config: Namespace, words: Sequence[str], default: Path) -> None:
    """Crop images to the network's size if the data take any size and none was set.

    A size in the `default` configuration, which is used without --config, is not one that the user has set.

    Args:
        config: the run's configuration, in which `data.init_args.image_size` is replaced if it is null.
        words: the command line.
        default: path of the default configuration.
    """
    arguments = config.data.get("init_args") or {}
    size = config.model.get("init_args.net.init_args.image_size")
    if "image_size" not in arguments or arguments["image_size"] is not None or size is None:
        return
    if _sets_network_argument(words, "image_size") or _has_own_config(config, default):
        arguments["image_size"] = size
        rank_zero_info(f"images are cropped to {size}x{size}, the network's size; --data.image_size sets another")


def _has_own_config(config: Namespace, default: Path) -> bool:
    """Return whether a --config differs from the default configuration."""
    paths = [Path(str(path)).resolve() for path in config.get("config") or ()]
    return any(path != default.resolve() for path in paths)


def size_evaluations(config: Namespace, words: Sequence[str], default: Path) -> None:
    """Size metrics and probes of the `default` configuration to the data and the run if the data are not the digits.

    The numbers in the default configuration are for the digits and its own length. Callbacks that the command line sets
    keep theirs.

    Args:
        config: the run's configuration, in which numbers of callbacks are replaced by null.
        words: the command line.
        default: path of the default configuration.
    """
    flags = {word.partition("=")[0] for word in words}
    if flags & {"--trainer", "--trainer.callbacks"} or _has_own_config(config, default):
        return
    if pkgutil.resolve_name(config.data.class_path) is Digits:
        return
    first: dict[str, Namespace] = {}  # callbacks that are appended by --trainer.callbacks+ come later
    for callback in config.trainer.callbacks or ():
        name = callback.class_path.rpartition(".")[2]
        first.setdefault(name, callback)
    if "GenerationMetrics" in first:
        arguments = first["GenerationMetrics"].init_args
        arguments.num = None
        extractor = arguments.extractor
        if not isinstance(extractor, str) and "steps" in extractor.init_args:
            extractor.init_args.steps = None
    if "LinearProbes" in first:
        first["LinearProbes"].init_args.max_train = None
    rank_zero_info("metrics and probes are sized to the data and the run (docs/training.md)")


def check_values(config: Namespace) -> None:
    """Raise a UserError for a value of a run's configuration that Lightning would reject only later, or not at all."""
    check_whole(0, MOST_SEED, seed_everything=config.seed_everything)
    if not isinstance(config.trainer, Namespace):
        raise UserError(f'"trainer" takes settings, such as `max_steps: 100`, got {config.trainer!r}')
    _check_trainer(config.trainer)
    arguments = config.model.get("init_args") or {}
    for name, setting in {"optim": "lr", "sampling": "steps"}.items():
        if name in arguments and arguments[name] is None:
            raise UserError(f"--model.{name} null: it takes settings; give --model.{name}.{setting} or leave it out")


def _check_trainer(trainer: Namespace) -> None:
    """Raise a UserError for a setting of the trainer that is out of range, or does not do here what it says."""
    for name, least in LEAST.items():
        value = trainer[name]
        if value is not None and not value >= least:  # NaN, too
            raise UserError(f"--trainer.{name} takes a number from {least}, got {value}")
    for name in ("max_steps", "max_epochs"):
        if trainer[name] == 0:
            raise UserError(f"--trainer.{name} 0 trains nothing: give a number from 1, or -1 for no limit")
    if trainer.val_check_interval == 0:
        raise UserError("--trainer.val_check_interval 0: --trainer.limit_val_batches 0 switches validation off")
    for name, instead in REFUSED.items():
        if trainer[name]:
            raise UserError(f"--trainer.{name} {trainer[name]}: {instead}")
    if "GradientAccumulationScheduler" in str(trainer.callbacks):
        raise UserError("GradientAccumulationScheduler changes the batch: set --data.batch_size, the same in all steps")
    strategy = trainer.strategy
    shards = any(word in str(strategy).lower() for word in SHARDING)
    if shards and strategy != "fsdp":
        raise UserError(f"--trainer.strategy {strategy}: only fsdp shards here; ddp does not shard")
    if str(trainer.precision) not in ("None", "32", *PRECISIONS):
        raise UserError(f"--trainer.precision takes {TAKEN['trainer.precision']}, got {trainer.precision}")
    if trainer.accelerator == "gpu" and not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        raise UserError("--trainer.accelerator gpu: torch finds no GPU on this machine; cpu trains without one")
    _check_folders(trainer)


def _check_folders(trainer: Namespace) -> None:
    """Raise a UserError for a run folder that is an address, such as s3://bucket: checkpoints are local files."""
    folders = [("default_root_dir", trainer.default_root_dir)]
    loggers = trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]
    for logger in loggers:
        if isinstance(logger, Namespace):
            folders.append(("logger.save_dir", logger.get("init_args.save_dir")))
    for name, folder in folders:
        if folder is not None and "://" in str(folder):
            raise UserError(f"--trainer.{name} {folder}: a run is written to a local folder, give its path")
