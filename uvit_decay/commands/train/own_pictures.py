"""What follows from a user's pictures and time: name and length of the run, start of the network, largest batch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch.utilities import rank_zero_info
from torch import device, nn

from uvit_decay.checkpoint.io import HOME, StoredModel
from uvit_decay.commands.train.words import sets_argument
from uvit_decay.data import ImageData
from uvit_decay.runs.settings import resolve_class
from uvit_decay.runtime.files import at_home
from uvit_decay.runtime.instantiate import Spec, build
from uvit_decay.runtime.program import find_bundled
from uvit_decay.tasks.init_from import find_misfits, read_weights

GENERAL = ("train", "images", "data")  # names of folders that do not name the data
ARCHIVES = (".zip", ".tar")


def prefer_minutes(config: Namespace, words: Sequence[str]) -> None:
    """Let --minutes of the command line replace the length of a configuration; steps and epochs of flags stay."""
    flags = {word.partition("=")[0] for word in words}
    if "--minutes" not in flags or "--trainer.max_epochs" in flags:
        return
    config.trainer.max_epochs = None  # epochs of the configuration would end a run whose steps are a flag
    if "--trainer.max_steps" not in flags:
        config.trainer.max_steps = -1


def name_run(config: Namespace) -> None:
    """Name the experiment of a logger after the data if it is null."""
    loggers = config.trainer.logger
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        arguments = logger.get("init_args") if isinstance(logger, Namespace) else None
        if arguments and "experiment" in arguments and arguments.experiment is None:
            arguments.experiment = name_data(config.data)


def name_data(data: Namespace) -> str:
    """Return the name of the data of a configuration: of its file or folder, or of the class without a path.

    If a folder has a general name, such as `train`, it is the name of the first folder around it that has another one.
    """
    path = data.get("init_args.path")
    if path is not None:
        path = Path(os.path.normpath(at_home(path).absolute()))  # `..` is no name
        for part in (path.name, *(parent.name for parent in path.parents)):
            name = part.removesuffix(path.suffix) if path.suffix.lower() in ARCHIVES else part
            if name and name.lower() not in GENERAL:
                return name
    return data.class_path.rpartition(".")[2].lower()


def start_from_noise_if_unfit(config: Namespace, words: Sequence[str]) -> None:
    """Set `init_from` to null if it is a bundled file whose weights the network of the configuration cannot take.

    A file that the command line names, and any other file, must fit: it is checked before training.

    Args:
        config: the configuration, with the sizes of the network, changed in place.
        words: the command line.
    """
    arguments = config.model.get("init_args") or Namespace()
    file = arguments.get("init_from")
    if file is None or sets_argument(words, "model.init_from") or not _is_bundled(Path(file)):
        return
    misfit = _describe_misfit(read_weights(Path(file)), arguments.net)
    if misfit:
        arguments.init_from = None
        rank_zero_info(f"training begins from noise: {file} has {misfit}")


def _is_bundled(file: Path) -> bool:
    """Return whether a name means a file of the package, not a file of the working folder."""
    bundled = find_bundled(file.as_posix())
    if file.is_absolute() or not bundled.is_file():
        return False
    return not file.exists() or file.samefile(bundled)


def _describe_misfit(stored: StoredModel, described: Namespace) -> str:
    """Return what a file has and a network of the configuration has not; empty if the network can take its weights."""
    spec = stored.card.net
    ours = resolve_class(described.class_path)
    if ours is not resolve_class(spec.class_path):
        return f"a {_name_class(spec.class_path)}, this network is a {_name_class(described.class_path)}"
    spec = Spec(spec.class_path, dict(described.init_args))
    with device("meta"):
        net = build(spec, nn.Module, HOME, where="the configuration")
    misfits = find_misfits(stored, net, Spec.of(type(net), net.config))
    return "; ".join(f"{change.name} {change.before}, this network has {change.now}" for change in misfits)


def _name_class(class_path: str) -> str:
    return class_path.rpartition(".")[2]


def cap_batch(config: Namespace, words: Sequence[str], data: ImageData) -> None:
    """Lower the batch of a configuration to the number of training images; a batch of the command line stays.

    Args:
        config: the configuration, changed in place.
        words: the command line.
        data: its data module, which is changed, too.
    """
    count = data.count_train()
    if count is None or data.batch_size <= count or sets_argument(words, "data.batch_size"):
        return
    rank_zero_info(f"--data.batch_size {count}, all training images: the configuration has {data.batch_size}")
    data.batch_size = config.data.init_args.batch_size = count
