"""Complete a parsed configuration of train.py by values that are known only when its data, task and flags are."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.commands.train.own_pictures import cap_batch, name_run, prefer_minutes, start_from_noise_if_unfit
from uvit_decay.commands.train.words import CONFIG_FLAGS, sets_argument
from uvit_decay.data import Digits, ImageData
from uvit_decay.data.classes import class_list
from uvit_decay.data.datamodule import Sizes
from uvit_decay.data.latents import manifest
from uvit_decay.data.latents.module import Latents
from uvit_decay.data.listing import list_images
from uvit_decay.decay import DEPTH_ATTENTION, SHORTCUTS
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import at_home

CLIP_FLAG = re.compile(r"--model(\.init_args)?\.sampling(\.init_args)?(\.clip\b|[ =]\S*clip\b)")
DATA_FLAG = re.compile(r"--data(\.(init_args\.)?path|\.class_path)?(=.*)?", re.DOTALL)
MOST_SIDE = 64  # pixels for the default network, whose patches have 2
NETWORK_TEXT = re.compile(r"--model(\.init_args)?(\.net)?[ =]\{")  # all settings of a network in one value


def complete(config: Namespace, words: Sequence[str], default: Path) -> ImageData | None:
    """Complete the configuration of a run, before its classes are instantiated.

    A value is changed only if it is null, or if it comes from a configuration and is meant for other data or another
    schedule. Each change is printed. What is changed is stored with the run like a flag.

    Args:
        config: the configuration, changed in place.
        words: the command line, whose values are never changed.
        default: path of the default configuration, which is used without --config.

    Returns:
        The data module, if it was built to find its sizes, with its files listed; otherwise None.

    Raises:
        UserError: the data cannot be listed.
    """
    is_default = not _has_own_config(config, default)
    leave_out_other_data(config, words)
    prefer_minutes(config, words)
    name_run(config)
    reset_alpha_min(config, words)
    unclip_latents(config, words)
    if not is_default or sets_argument(words, "model.net.image_size"):
        crop_to_network(config)
    data = replace_default_sizes(config, words) if is_default else take_data_sizes(config)
    start_from_noise_if_unfit(config, words)
    if data is not None:
        cap_batch(config, words, data)
    return data


def _has_own_config(config: Namespace, default: Path) -> bool:
    """Return whether a --config differs from the default configuration."""
    paths = [Path(str(path)).resolve() for path in config.get("config") or ()]
    return any(path != default.resolve() for path in paths)


def find_default_sizes(config: Namespace, words: Sequence[str]) -> list[str]:
    """Return which sizes of the default network are to follow the data: if the command line names data, all it leaves.

    The sizes of the default configuration are the sizes of the digits.
    """
    names_data = any(map(DATA_FLAG.fullmatch, words)) and _find_data_class(config) is not Digits
    if not names_data or NETWORK_TEXT.search(" ".join(words)):
        return []
    arguments = _find_network_arguments(config)
    return [name for name in Sizes._fields if name in arguments and not sets_argument(words, f"model.net.{name}")]


def replace_default_sizes(config: Namespace, words: Sequence[str]) -> ImageData | None:
    """Replace the sizes of the default network by the sizes of the data that the command line names.

    If the data cannot be opened, nothing is changed: the error comes when all processes have met, so that none waits.

    Returns:
        The data module, or None if no size is null.

    Raises:
        UserError: the data cannot be opened, and the command line sets a size to null.
    """
    arguments = _find_network_arguments(config)
    followed = find_default_sizes(config, words)
    sizes = {name: arguments[name] for name in followed}
    for name in followed:
        arguments[name] = None
    with suppress(UserError):
        return take_data_sizes(config, MOST_SIDE if "image_size" in followed else None)
    for name, size in sizes.items():
        arguments[name] = size
    return take_data_sizes(config)


def _sets_data_argument(words: Sequence[str], name: str) -> bool:
    """Return whether a flag of the command line sets this argument of the data module, after the last --config."""
    first = 0
    for number, word in enumerate(words):
        if word.partition("=")[0] in CONFIG_FLAGS:
            first = number  # the configuration may replace the value of an earlier flag
    return sets_argument(words[first:], f"data.{name}")


def leave_out_other_data(config: Namespace, words: Sequence[str]) -> None:
    """Set test images and class list of a configuration to null if the command line names other data by --data.path.

    What the command line sets stays. The class list also stays if the data have one of its classes: then they are a
    copy of the configuration's data, or a part of it, which the data module refuses.
    """
    if not _sets_data_argument(words, "path"):
        return
    arguments = config.data.init_args
    for name in _find_other_data(config, words):
        instead = "; --data.test_path or --data.holdout 0.1 gives test images" if name == "test_path" else ""
        rank_zero_info(f"--data.path leaves out the configuration's {name} {arguments[name]}{instead}")
        arguments[name] = None


def _find_other_data(config: Namespace, words: Sequence[str]) -> Iterator[str]:
    """Yield the arguments of the data module that a configuration sets for other data than the command line names."""
    arguments = config.data.init_args
    for name in ("test_path", "classes"):
        if arguments.get(name) is None or _sets_data_argument(words, name):
            continue
        if name == "test_path" or not _has_class_of(arguments[name], config):
            yield name


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


def _find_network_arguments(config: Namespace) -> Namespace:
    """Return the arguments of the network in a configuration, to be changed in place; empty if there are none."""
    return config.model.get("init_args.net.init_args") or Namespace()


def reset_alpha_min(config: Namespace, words: Sequence[str]) -> None:
    """Set alpha_min to 1 for a schedule of the command line that has none, unless the command line sets it.

    The alpha_min of a configuration belongs to the schedule of this configuration.
    """
    sets_schedule = sets_argument(words, "model.net.schedule")
    sets_alpha_min = sets_argument(words, "model.net.alpha_min")
    arguments = _find_network_arguments(config)
    if not sets_schedule or sets_alpha_min or arguments.get("alpha_min") in (None, 1.0):
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


def unclip_latents(config: Namespace, words: Sequence[str]) -> None:
    """Switch off `sampling.clip` of a configuration if the data are latents, unless the command line sets it.

    Clipping to [-1, 1] is for pixels; latents of unit variance exceed this range.
    """
    sampling = config.model.init_args.get("sampling")
    if not sampling or not sampling.get("clip") or not issubclass(_find_data_class(config), Latents):
        return
    if CLIP_FLAG.search(" ".join(words)):
        rank_zero_info("warning: --model.sampling.clip clamps latents to [-1, 1] in sampling; it is meant for pixels")
        return
    sampling.clip = None
    rank_zero_info("sampling.clip of the configuration is off: it is for pixels, --model.sampling.clip true forces it")


def _find_data_class(config: Namespace) -> type[ImageData]:
    """Return the class of the data module in a configuration."""
    return pkgutil.resolve_name(config.data.class_path)


def crop_to_network(config: Namespace) -> None:
    """Crop images to the network's size if the data take any size and none was set."""
    arguments = config.data.get("init_args") or Namespace()
    size = _find_network_arguments(config).get("image_size")
    if "image_size" not in arguments or arguments["image_size"] is not None or size is None:
        return
    arguments["image_size"] = size
    rank_zero_info(f"images are cropped to {size}x{size}, the network's size; --data.image_size sets another")


def take_data_sizes(config: Namespace, most_side: int | None = None) -> ImageData | None:
    """Replace null sizes of the network by the sizes of the data; return the data module, or None without null sizes.

    If the size of the images is null as well, both get the size that the data module finds.

    Args:
        config: the configuration, changed in place.
        most_side: the largest size to be found, in pixels; larger images are cropped to the usual size of the data
            module. None: no limit.
    """
    arguments = _find_network_arguments(config)
    taken = [name for name in Sizes._fields if name in arguments and arguments[name] is None]
    if not taken:
        return None
    data = _build_data(config.data)
    sizes = data.find_sizes()
    is_open = config.data.get("init_args.image_size", 0) is None
    if is_open and most_side is not None and sizes.image_size > most_side:
        data.image_size = data.usual_size
        sizes = sizes._replace(image_size=data.usual_size)
    for name in taken:
        arguments[name] = getattr(sizes, name)
    if is_open:
        config.data.init_args.image_size = sizes.image_size
    values = ", ".join(f"{name} {arguments[name]}" for name in taken)
    rank_zero_info(f"the network has {values}, as the data")
    if "num_classes" in taken:
        _tell_unguided(config, sizes)
    return data


def _build_data(config: Namespace) -> ImageData:
    """Build the data module of a configuration as LightningCLI does later."""
    parser = ArgumentParser()
    parser.add_subclass_arguments(ImageData, "data")
    return parser.instantiate(Namespace(data=config)).data


def _tell_unguided(config: Namespace, sizes: Sizes) -> None:
    """Print that settings of conditional networks do nothing if the data have no classes.

    The settings stay, because all that samples drops the guidance of an unconditional network.
    """
    arguments = config.model.init_args
    unused = []
    if arguments.get("label_dropout"):
        unused.append("label_dropout")
    if arguments.get("sampling.guidance", 1.0) != 1.0:
        unused.append("sampling.guidance")
    if sizes.num_classes == 0 and unused:
        rank_zero_info(f"the data have no classes: {' and '.join(unused)} of the configuration do nothing")
