"""Images and data named on the command line: a path, a data set with its split, or the data of a configuration."""

from __future__ import annotations

from pathlib import Path

from uvit_decay.data import CIFAR10, CIFAR100, AugmentedImages, Digits, ImageData, Images
from uvit_decay.evaluation.image_sources import ArrayImages, DatasetImages, FileImages, ImageSource
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import at_home
from uvit_decay.runtime.instantiate import Spec, build
from uvit_decay.runtime.program import find_config
from uvit_decay.runtime.validation import read_yaml, typed

SMALL = 64  # pixels: pictures of this size or less fill their frame
SETS = {"digits": Digits, "cifar10": CIFAR10, "cifar100": CIFAR100}
FORMS = (
    "a folder, zip or tar of images, an .npz, a data set such as "
    + ", ".join(f"{name}:train" for name in SETS)
    + ", or a configuration such as configs/cifar100_uvit_s.yaml:train"
)


def open_images(name: str, channels: int, image_size: int | None = None) -> ImageSource:
    """Open the images that `name` refers to.

    Args:
        name: one of FORMS.
        channels: 1 for grey, 3 for RGB; image files are converted to either, arrays and data sets from grey to RGB.
        image_size: size that image files are cropped to, as ADM does; with None they must be squares of one size.
    """
    stem, _, split = name.rpartition(":")
    if stem in SETS or stem.endswith((".yaml", ".yml")):
        return _of_set(stem, split, channels)
    path = at_home(name)
    if not path.exists():
        raise UserError(f"{name}: nothing there; {FORMS}")
    if path.suffix.lower() == ".npz":
        return ArrayImages(path, channels)
    return FileImages(path, channels, image_size)


def open_data(name: str, test: str | None, image_size: int, channels: int, clean: bool = False) -> ImageData:
    """Open training and test data: a name in SETS, a configuration, or images (a tenth is held out without `test`).

    Args:
        name: such as cifar100, configs/cifar100_uvit_s.yaml, or the path of a folder, zip or tar of class folders.
        test: path of test images, if `name` is a path of images.
        image_size: size that images are cropped to, the network's.
        channels: channels of the images, the network's.
        clean: images at a path get the test crop of classifiers: shorter side image_size / 0.875, bicubic, then the
            centre, or the whole of pictures up to SMALL pixels; otherwise ADM's crop, as denoisers train on.
    """
    if name in SETS or name.endswith((".yaml", ".yml")):
        if test:
            raise UserError(f"--test {test} is for class folders, {name} has test images of its own")
        data = _data_module(name, image_size)
    elif at_home(name).exists():
        sizes = {"image_size": image_size, "channels": channels, "batch_size": 1}
        holdout = 0.0 if test else 0.1
        if clean:
            crop = 1.0 if image_size <= SMALL else 0.875
            # No memory for pictures: each is read once.
            data = AugmentedImages(name, test_path=test, test_crop=crop, holdout=holdout, memory_gb=0, **sizes)
        else:
            data = Images(name, test, holdout, **sizes)
    else:
        raise UserError(f"--data {name}: {', '.join(SETS)}, a configuration, or the path of class folders")
    data.setup()
    if (data.image_size, data.channels) != (image_size, channels):
        actual = f"{data.image_size}x{data.image_size}x{data.channels}"
        raise UserError(f"{name} has {actual}, the network takes {image_size}x{image_size}x{channels}")
    return data


def picture_protocol(data: ImageData) -> str:
    """Return how the pictures were resized and cropped, for reports."""
    size = data.image_size
    if isinstance(data, AugmentedImages):
        return f"shorter side {data.crop.shorter_side(size)}, bicubic, centre {size}"
    return f"crop of ADM, {size}" if isinstance(data, Images) else f"as stored, {size}"


def judged_on(data: ImageData) -> str:
    """Return which images are the test images, for reports."""
    if not isinstance(data, Images):
        which = "those of the data"
    elif data.test_name:
        which = data.test_name
    else:
        which = f"{data.holdout:.0%} of these data, held out; a training that did not has seen them"
    return f"{which}; {data.overlap}" if data.overlap else which


def _of_set(stem: str, split: str, channels: int) -> DatasetImages:
    if split not in ("train", "test"):
        raise UserError(f"{stem}:{split}: the split is train or test")
    data = _data_module(stem)
    data.setup()
    images = data.train if split == "train" else data.test
    if data.latents:
        raise UserError(f"{stem} has latents: name the images that they were made of, with --image-size")
    if images is None:
        raise UserError(f"{stem} has no test images")
    return DatasetImages(f"{data.name}-{split}", images, channels, data.class_names)


def _data_module(name: str, image_size: int | None = None) -> ImageData:
    """Build a data set in SETS, or the data module of a configuration.

    `image_size` is the network's, to which images of a configuration without a size are cropped.
    """
    if name in SETS:
        return SETS[name]()
    data = typed(dict[str, object], read_yaml(Path(find_config(name))).get("data"), f"{name}: data")
    values = {"class_path": data.get("class_path"), "init_args": data.get("init_args") or {}}
    spec = typed(Spec, values, f"{name}: data")
    if not spec.is_from("uvit_decay.data"):
        raise UserError(f"{name}: data names {spec.class_path}, which is no data module of uvit_decay.data")
    module = build(spec, ImageData, "uvit_decay.data", where=f"{name}: data")
    if image_size is not None and isinstance(module, Images) and spec.init_args.get("image_size") is None:
        module.image_size = image_size
    return module
