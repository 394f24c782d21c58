"""Images named on the command line: a path, a data set with its split, or the data of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from uvit_decay.data.decoding import Reading
from uvit_decay.data.named import SETS, build_data, is_data_set
from uvit_decay.evaluation.image_sources import ArrayImages, DatasetImages, FileImages, ImageSource
from uvit_decay.files.writing import at_home
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Bounds, check_types

EXAMPLES = ", ".join(f"{name}:train" for name in SETS)
FORMS = (
    f"a folder, zip or tar of images, an .npz, a data set such as {EXAMPLES}, or a configuration such as "
    "configs/cifar100_uvit_s.yaml:train"
)


@check_types
def open_images(
    name: str,
    channels: Literal[1, 3],
    image_size: Annotated[int | None, Bounds(1, 2**16)] = None,
    on_white: bool = True,
) -> ImageSource:
    """Open the images that `name` refers to.

    Args:
        name: a name in one of FORMS.
        channels: 1 for grey, 3 for RGB. Image files and arrays are converted to either, data sets from grey to RGB.
        image_size: size that image files are cropped to, as ADM does; with None they must be squares of the same size.
        on_white: put transparent image files on white; otherwise their transparency is dropped, see `Reading`.
    """
    if is_data_set(name):
        stem, _, split = name.rpartition(":")
        if split not in ("train", "test"):
            raise UserError(f"{name}: the split must be train or test")
        images = _open_split(stem, split, channels)
        if images is None:
            raise UserError(f"{stem} has no test images")
        return images
    path = at_home(name)
    if not path.exists():
        raise UserError(f"{name} does not exist: give {FORMS}")
    if path.suffix.lower() == ".npz":
        return ArrayImages(path, channels)
    return FileImages(path, channels, image_size, Reading(on_white=on_white))


def count_channels(name: str) -> int | None:
    """Return the number of channels of a data set or configuration; None for a path, whose images are read as asked."""
    if not is_data_set(name):
        return None
    stem, _, _ = name.rpartition(":")
    return build_data(stem).channels


def open_test_images(name: str, channels: int) -> ImageSource | None:
    """Return the test images of the data set of which `name` names the training images; None if there are none.

    Args:
        name: a name as in `open_images`.
        channels: 1 for grey, 3 for RGB.
    """
    stem, _, split = name.rpartition(":")
    if not is_data_set(name) or split != "train":
        return None
    return _open_split(stem, "test", channels)


def _open_split(stem: str, split: str, channels: int) -> DatasetImages | None:
    """Open the training or test images of a data set in SETS or of a configuration; None if it has none."""
    data = build_data(stem)
    data.setup()
    images = data.train if split == "train" else data.test
    if data.latents:
        raise UserError(f"{stem} has latents: name the images from which they were made, with `image_size`")
    if images is None:
        return None
    return DatasetImages(f"{data.name}-{split}", images, channels, data.class_names)
