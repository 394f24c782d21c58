"""Complete a parsed configuration of train.py by values that are known only when its data, task and flags are."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.utilities import rank_zero_info
from torch import device, nn

from uvit_decay.checkpoint.detect import KEY
from uvit_decay.checkpoint.io import HOME, ModelCard, StoredModel, read_training_checkpoint
from uvit_decay.commands.train.words import Given
from uvit_decay.data import ImageData
from uvit_decay.data.classes import class_list
from uvit_decay.data.datamodule import Sizes
from uvit_decay.data.labels import AUTO, FOLDERS
from uvit_decay.data.listing import list_images
from uvit_decay.data.splits import are_parts
from uvit_decay.decay import SHORTCUTS
from uvit_decay.files.instantiate import Spec, build
from uvit_decay.files.writing import at_home
from uvit_decay.latents import manifest
from uvit_decay.latents.module import Latents
from uvit_decay.runs.checkpoints import NAMES
from uvit_decay.runs.history import CHECKPOINTS, list_run_folders
from uvit_decay.runs.settings import resolve_class
from uvit_decay.tasks.init_from import find_misfits, read_weights
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.program import find_bundled

GENERAL = ("train", "images", "data")  # names of folders that do not name the data
ARCHIVES = (".zip", ".tar")
Rule = Callable[[Namespace, Given], str | None]


def complete(config: Namespace, given: Given) -> ImageData | None:
    """Complete the configuration of a run, before its classes are instantiated.

    A value is changed only if it is null, or if it comes from a configuration and is meant for other data or another
    schedule. Each change is printed. What is changed is stored with the run like a flag.

    Args:
        config: the configuration, changed in place.
        given: the settings of the command line, whose values are never changed.

    Returns:
        The data module, if it was built to find its sizes, with its files listed; otherwise None.
    """
    rules = (leave_out_classes, prefer_minutes, name_run, keep_split_classes)
    for rule in (*rules, reset_alpha_min, unclip_latents, crop_to_network):
        _apply(rule, config, given)
    data = take_data_sizes(config)
    _apply(start_from_noise_if_unfit, config, given)
    if data is not None:
        cap_batch(config, given, data)
    return data


def _apply(rule: Rule, config: Namespace, given: Given) -> None:
    """Apply a rule to a configuration, and print its remark."""
    remark = rule(config, given)
    if remark:
        rank_zero_info(remark)


def leave_out_classes(config: Namespace, given: Given) -> str | None:
    """Set the class list of a configuration to null if the command line names other data by --data.path.

    The class list stays if the data have one of its classes: then they are a copy of the configuration's data, or a
    part of it, which the data module refuses.
    """
    arguments = config.data.init_args
    name = arguments.get("classes")
    if "data.path" not in given or "data.classes" in given or name is None or _has_class_of(name, config):
        return None
    arguments.classes = None
    return f"--data.path leaves out the configuration's classes {name}"


def _has_class_of(name: str, config: Namespace) -> bool:
    """Return whether the data of a configuration have a class of this class list.

    It is also True if list or data cannot be read: the error comes when all processes have met, so that none waits.
    """
    path = at_home(config.data.init_args.path)
    with suppress(UserError):
        listed = class_list(name)
        if issubclass(_find_data_class(config), Latents):
            return not set(listed).isdisjoint(manifest.read(path).class_names)
        if any((path / word).is_dir() for word in listed):  # found without a list of all files
            return True
        return not set(listed).isdisjoint(list_images(path).class_names)
    return True


def prefer_minutes(config: Namespace, given: Given) -> None:
    """Let --minutes of the command line replace the length of a configuration; steps and epochs of flags stay."""
    if "minutes" not in given or "trainer.max_epochs" in given:
        return
    config.trainer.max_epochs = None  # epochs of the configuration would end a run whose steps are a flag
    if "trainer.max_steps" not in given:
        config.trainer.max_steps = -1


def name_run(config: Namespace, given: Given) -> None:
    """Name the experiment of a logger after the data if it is null."""
    loggers = config.trainer.logger
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        arguments = logger.get("init_args") if isinstance(logger, Namespace) else None
        if arguments and "experiment" in arguments and arguments.experiment is None:
            arguments.experiment = name_data(config.data)


def keep_split_classes(config: Namespace, given: Given) -> str | None:
    """Take the folders of splits as classes if the run resumes from a checkpoint whose classes they are.

    Earlier runs took folders such as Training and Testing, which are now read as the parts of a data set, as classes.
    """
    arguments = config.data.get("init_args") or Namespace()
    chosen = config.get("ckpt_path")
    if not chosen or arguments.get("labels") != AUTO:
        return None
    for path in _list_resumable(config):
        with suppress(UserError):  # the error comes when the run resumes
            contents = read_training_checkpoint(path, whole=False)
            before = contents.get("settings") or {}  # none of a run of a script
            if chosen in NAMES and before.get("data.path") != str(arguments.get("path")):
                continue
            classes = ModelCard.from_dict(contents[KEY], path).class_names
            if before.get("data.labels", AUTO) != AUTO or not are_parts(classes):
                return None
            arguments.labels = FOLDERS
            return f"--data.labels {FOLDERS}: the classes of {path} are the folders {', '.join(classes)}"
    return None


def _list_resumable(config: Namespace) -> Iterator[Path]:
    """Yield the checkpoint that --ckpt_path names, or those of the runs of this experiment."""
    if config.ckpt_path not in NAMES:
        yield Path(config.ckpt_path)
        return
    loggers = config.trainer.logger
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        arguments = logger.get("init_args") if isinstance(logger, Namespace) else None
        if arguments and arguments.get("experiment"):
            for run in list_run_folders(Path(arguments.save_dir, arguments.experiment)):
                yield from (run / CHECKPOINTS).glob("*.ckpt")


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


def reset_alpha_min(config: Namespace, given: Given) -> str | None:
    """Set alpha_min to 1 for a schedule of the command line that has none, unless the command line sets it.

    The alpha_min of a configuration belongs to the schedule of this configuration.
    """
    arguments = _find_network_arguments(config)
    if "model.net.schedule" not in given or "model.net.alpha_min" in given:
        return None
    schedule = arguments.get("schedule")
    if arguments.get("alpha_min") in (None, 1.0) or not _lacks_alpha_min(schedule):
        return None
    arguments["alpha_min"] = 1.0
    name = schedule if isinstance(schedule, str) else schedule.__name__
    return f"--model.net.alpha_min 1, because schedule {name} has no alpha_min"


def _lacks_alpha_min(schedule: object) -> bool:
    """Return whether a schedule is known to have no alpha_min; False for unknown names, numbers and functions."""
    if isinstance(schedule, str) and schedule in SHORTCUTS:
        return not SHORTCUTS[schedule].falls
    return isinstance(schedule, type)


def unclip_latents(config: Namespace, given: Given) -> str | None:
    """Switch off `sampling.clip` of a configuration if the data are latents, unless the command line sets it.

    Clipping to [-1, 1] is for pixels; latents of unit variance exceed this range.
    """
    sampling = config.model.init_args.get("sampling")
    if "model.sampling.clip" in given or not sampling or not sampling.get("clip"):
        return None
    if not issubclass(_find_data_class(config), Latents):
        return None
    sampling.clip = None
    return "sampling.clip of the configuration is off: it is for pixels, --model.sampling.clip true forces it"


def crop_to_network(config: Namespace, given: Given) -> str | None:
    """Crop images to the network's size if the data take any size and none was set."""
    arguments = config.data.get("init_args") or Namespace()
    size = _find_network_arguments(config).get("image_size")
    if "image_size" not in arguments or arguments["image_size"] is not None or size is None:
        return None
    arguments["image_size"] = size
    return f"images are cropped to {size}x{size}, the network's size; --data.image_size sets another"


def take_data_sizes(config: Namespace) -> ImageData | None:
    """Replace null sizes of the network by the sizes of the data; return the data module, or None without null sizes.

    If the size of the images is null as well, both get the size that the data module finds.
    """
    arguments = _find_network_arguments(config)
    taken = [name for name in Sizes._fields if name in arguments and arguments[name] is None]
    if not taken:
        return None
    parser = ArgumentParser()  # it builds the data module as LightningCLI does later
    parser.add_subclass_arguments(ImageData, "data")
    data = parser.instantiate(Namespace(data=config.data)).data
    sizes = data.find_sizes()
    for name in taken:
        arguments[name] = getattr(sizes, name)
    if config.data.get("init_args.image_size", 0) is None:
        config.data.init_args.image_size = sizes.image_size
    values = ", ".join(f"{name} {arguments[name]}" for name in taken)
    rank_zero_info(f"the network has {values}, as the data")
    return data


def start_from_noise_if_unfit(config: Namespace, given: Given) -> str | None:
    """Set `init_from` to null if it is a bundled file whose weights the network of the configuration cannot take.

    A file that the command line names, and any other file, must fit: it is checked before training.

    Args:
        config: the configuration, with the sizes of the network, changed in place.
        given: the settings of the command line.
    """
    arguments = config.model.get("init_args") or Namespace()
    file = arguments.get("init_from")
    if file is None or "model.init_from" in given or not _is_bundled(Path(file)):
        return None
    misfit = _describe_misfit(read_weights(Path(file)), arguments.net)
    if not misfit:
        return None
    arguments.init_from = None
    return f"training begins from noise: {file} has {misfit}"


def _is_bundled(file: Path) -> bool:
    """Return whether a name means a file of the package, not a file of the working folder."""
    bundled = find_bundled(file.as_posix())
    if file.is_absolute() or not bundled.is_file():
        return False
    return not file.exists() or file.samefile(bundled)


def _describe_misfit(stored: StoredModel, described: Namespace) -> str:
    """Return what a file has and a network of the configuration has not; empty if the network can take its weights."""
    spec = stored.card.net
    if resolve_class(described.class_path) is not resolve_class(spec.class_path):
        stored_name, name = (path.rpartition(".")[2] for path in (spec.class_path, described.class_path))
        return f"a {stored_name}, this network is a {name}"
    spec = Spec(spec.class_path, dict(described.init_args))
    with device("meta"):
        net = build(spec, nn.Module, HOME, where="the configuration")
    misfits = find_misfits(stored, net, Spec.of(type(net), net.config))
    return "; ".join(f"{change.name} {change.before}, this network has {change.now}" for change in misfits)


def cap_batch(config: Namespace, given: Given, data: ImageData) -> None:
    """Lower the batch of a configuration to the number of training images; a batch of the command line stays.

    Args:
        config: the configuration, changed in place.
        given: the settings of the command line.
        data: the data module of the configuration, which is changed, too.
    """
    count = data.count_train()
    if count is None or data.batch_size <= count or "data.batch_size" in given:
        return
    rank_zero_info(f"--data.batch_size {count}, all training images: the configuration has {data.batch_size}")
    data.batch_size = config.data.init_args.batch_size = count


def _find_network_arguments(config: Namespace) -> Namespace:
    """Return the arguments of the network in a configuration, to be changed in place; empty if there are none."""
    return config.model.get("init_args.net.init_args") or Namespace()


def _find_data_class(config: Namespace) -> type[ImageData]:
    """Return the class of the data module in a configuration."""
    return pkgutil.resolve_name(config.data.class_path)
