"""What --samples and --reference name: a path, a data set and its split, or the data of a configuration."""

from __future__ import annotations

from pathlib import Path

from uvit_decay.data import CIFAR10, CIFAR100, Digits, ImageData, Images
from uvit_decay.disk import at_home
from uvit_decay.errors import UserError
from uvit_decay.evaluation.pictures import OfArray, OfFiles, OfSet, Pictures
from uvit_decay.evaluation.statistics import StatisticsFile
from uvit_decay.plain import read_yaml, typed
from uvit_decay.specs import Spec, build

SETS = {"digits": Digits, "cifar10": CIFAR10, "cifar100": CIFAR100}
FORMS = (
    "a folder, zip or tar of pictures, an .npz, a data set such as "
    + ", ".join(f"{name}:train" for name in SETS)
    + ", or a configuration such as configs/cifar100_uvit_s.yaml:train"
)


def open_pictures(name: str, channels: int, image_size: int | None = None) -> Pictures:
    """The pictures that `name` stands for.

    Args:
        name: one of FORMS.
        channels: 1 for grey, 3 for RGB; pictures of files are converted, grey ones of arrays and sets made RGB.
        image_size: crop pictures of files to this size, as ADM does; else they must be squares of one size.

    Raises:
        UserError: nothing of that name, or not what it should be.
    """
    stem, _, split = name.rpartition(":")
    if stem in SETS or stem.endswith((".yaml", ".yml")):
        return _of_set(stem, split, channels)
    path = at_home(name)
    if not path.exists():
        raise UserError(f"{name}: nothing there; {FORMS}")
    if path.suffix.lower() == ".npz":
        return OfArray(path, channels)
    return OfFiles(path, channels, image_size)


def open_reference(
    name: str, channels: int, image_size: int | None = None
) -> tuple[StatisticsFile | None, Pictures | None]:
    """Statistics, pictures, or, of ADM's reference files, both."""
    path = at_home(name)
    if path.suffix.lower() != ".npz" or not path.exists():
        return None, open_pictures(name, channels, image_size)
    file = StatisticsFile(path)
    if not file.has("features"):
        return None, OfArray(path, channels)
    return file, OfArray(path, channels) if file.has_pictures else None


def open_data(name: str, test: str | None, image_size: int, channels: int) -> ImageData:
    """Training and test data: a name in SETS, a configuration, or pictures, of which a tenth is held out if not `test`.

    Args:
        name: such as cifar100, configs/cifar100_uvit_s.yaml, or the path of a folder, zip or tar of class folders.
        test: path of test pictures, for the last.
        image_size: that pictures are cropped to.
        channels: of the pictures.

    Raises:
        UserError: nothing of that name, or of another size than the network takes.
    """
    if name in SETS or name.endswith((".yaml", ".yml")):
        if test:
            raise UserError(f"--test {test} is for class folders, {name} has test images of its own")
        data = SETS[name]() if name in SETS else _configured(Path(name))
    elif at_home(name).exists():
        holdout = 0.0 if test else 0.1
        data = Images(name, test, holdout, image_size=image_size, channels=channels, batch_size=1)
    else:
        raise UserError(f"--data {name}: {', '.join(SETS)}, a configuration, or the path of class folders")
    data.setup()
    if (data.image_size, data.channels) != (image_size, channels):
        own, wanted = (f"{side}x{side}x{c}" for side, c in ((data.image_size, data.channels), (image_size, channels)))
        raise UserError(f"{name} has {own}, the network takes {wanted}")
    return data


def _of_set(stem: str, split: str, channels: int) -> OfSet:
    if split not in ("train", "test"):
        raise UserError(f"{stem}:{split}: the split is train or test")
    data = SETS[stem]() if stem in SETS else _configured(Path(stem))
    data.setup()
    images = data.train if split == "train" else data.test
    if data.latents:
        raise UserError(f"{stem} has latents: name the pictures that they were made of, with --image-size")
    if images is None:
        raise UserError(f"{stem} has no test pictures")
    return OfSet(f"{data.name}-{split}", images, channels, data.class_names)


def _configured(path: Path) -> ImageData:
    """The data module of a configuration."""
    data = typed(dict[str, object], read_yaml(path).get("data"), f"{path}: data")
    wanted = {"class_path": data.get("class_path"), "init_args": data.get("init_args") or {}}
    return build(typed(Spec, wanted, f"{path}: data"), ImageData, "uvit_decay.data")
