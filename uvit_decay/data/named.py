"""Data named on the command line: a data set, the data of a configuration, or the path of class folders."""

from __future__ import annotations

from pathlib import Path

from uvit_decay.data.augmented import AugmentedImages
from uvit_decay.data.cifar import CIFAR10, CIFAR100
from uvit_decay.data.datamodule import ImageData
from uvit_decay.data.digits import Digits
from uvit_decay.data.folder import Images
from uvit_decay.files.instantiate import Spec, build
from uvit_decay.files.validation import as_type, read_yaml
from uvit_decay.files.writing import at_home
from uvit_decay.terminal.errors import UserError, name_flags
from uvit_decay.terminal.program import find_config
from uvit_decay.terminal.typed import check_types

SMALL = 64  # pixels: pictures of this size or less fill their frame
SETS = {"digits": Digits, "cifar10": CIFAR10, "cifar100": CIFAR100}


@check_types
def open_data(name: str, test: str | None, image_size: int, channels: int, clean: bool = False) -> ImageData:
    """Open training and test data: a name in SETS, a configuration, or images.

    A tenth of images at a path is held out for testing, unless `test` is given.

    Args:
        name: such as cifar100, configs/cifar100_uvit_s.yaml, or the path of a folder, zip or tar of class folders.
        test: path of test images, if `name` is a path of images.
        image_size: image size of the network, to which images are cropped.
        channels: number of channels of the network.
        clean: crop images at a path as classifiers are tested: shorter side image_size / 0.875, bicubic, then the
            centre; up to SMALL pixels the whole picture. Otherwise they get ADM's crop, as in the training of
            denoisers.
    """
    if name in SETS or name.endswith((".yaml", ".yml")):
        if test:
            own = "has its own test images" if name in SETS else "takes them from its test_path"
            raise UserError(f"`test` {test}: {name} {own}; leave it out")
        data = build_data(name, image_size)
        data.setup()
    elif at_home(name).exists():
        sizes = {"image_size": image_size, "channels": channels, "batch_size": 1}
        holdout = 0.0 if test else 0.1
        arguments = {"path": "`data`", "test_path": "`test`"}  # of this function, by those of data modules
        with name_flags(lambda argument, frames: arguments.get(argument)):
            if clean:
                crop = 1.0 if image_size <= SMALL else 0.875
                # No memory for pictures: each is read once.
                data = AugmentedImages(name, test_path=test, test_crop=crop, holdout=holdout, memory_gb=0, **sizes)
            else:
                data = Images(name, test, holdout, **sizes)
            data.setup()
    else:
        raise UserError(f"`data` {name} does not exist: give {', '.join(SETS)}, a configuration, or class folders")
    if (data.image_size, data.channels) != (image_size, channels):
        actual = f"{data.image_size}x{data.image_size}x{data.channels}"
        raise UserError(f"{name} has {actual} images, but the network takes {image_size}x{image_size}x{channels}")
    return data


def build_data(name: str, image_size: int | None = None) -> ImageData:
    """Build a data set in SETS, or the data module of a configuration.

    Args:
        name: name of the data set or configuration.
        image_size: image size of the network, to which images are cropped if the configuration has no size; None
            takes the common size of the images, as training does.
    """
    if name in SETS:
        return SETS[name]()
    where = f"{name}: data"
    data = as_type(dict[str, object], read_yaml(Path(find_config(name))).get("data"), where)
    values = {"class_path": data.get("class_path"), "init_args": data.get("init_args") or {}}
    spec = as_type(Spec, values, where)
    if not spec.is_from("uvit_decay.data"):
        raise UserError(f"{where}: {spec.class_path} is not a data module of uvit_decay.data")
    module = build(spec, ImageData, "uvit_decay.data", where=where)
    if isinstance(module, Images) and spec.init_args.get("image_size") is None:
        if image_size is None:
            module.find_sizes()
        else:
            module.image_size = image_size
    return module


def is_data_set(name: str) -> bool:
    """Return whether a name of images is a data set or a configuration with its split, and not a path."""
    stem, _, split = name.rpartition(":")
    return bool(split) and (stem in SETS or stem.endswith((".yaml", ".yml")))


def describe_data(data: ImageData, trained_on: str | None = None) -> dict[str, str]:
    """Return the descriptions of the pictures and of the test images for reports, see `ImageData`."""
    return {"pictures": data.describe_pictures(), "test images": data.describe_test_images(trained_on)}
