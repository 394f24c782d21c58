"""The data module for image folders, zips and tars."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor

from uvit_decay.data.batches import ImageSet, InMemory
from uvit_decay.data.classes import class_list
from uvit_decay.data.datamodule import ImageData, Sizes
from uvit_decay.data.decoding import Channels, Crop, Decoding, Reading, Side, centre_crop
from uvit_decay.data.fingerprint import MOST_MEASURED, hash_files, name_shared, spread
from uvit_decay.data.label_tables import Columns
from uvit_decay.data.labels import AUTO, FOLDERS, LEAF, LabelOptions
from uvit_decay.data.listing import Listing, adopt_classes, check_columns, describe_listing, list_parts
from uvit_decay.data.reading import (
    UNREAD,
    OnDisk,
    check_headers,
    common_side,
    explain_failures,
    find_failures,
    leave_out_unreadable,
    store_list,
    try_read,
    warn_of_dark_images,
)
from uvit_decay.data.splits import hold_out
from uvit_decay.files.writing import check_writable
from uvit_decay.terminal.errors import UserError, with_flags
from uvit_decay.terminal.typed import Within, check_types

MOST_SIDE = 1024  # pixels; larger images are rarely what a network is built for
SKIP_HINT = "; to leave such images out, set `skip_unreadable` true"


@check_types
class Images(ImageData):
    """A folder, zip or tar of images in any of `FORMATS`, with classes by folders or by a table, or without classes.

    Folders are read as torchvision's ImageFolder reads them: the first level is the class, and folders around all
    classes do not count. Tars must not be compressed, and nothing is unpacked to disk. Archives inside an archive or
    folder are not opened. Images are scaled and cropped by the centre crop of ADM, DiT, SiT and U-ViT; as there, the
    EXIF orientation is ignored.

    Args:
        path: folder, zip or tar of the training images.
        test_path: folder, zip or tar with the same classes, for validation loss and probes.
        holdout: without test images, the share of each class that is held out of training as test images; 0 for none.
        classes: a named class list (imagenet-100/cmc, imagenet-1k) or a text file of classes; null takes all classes.
        image_size: height and width in pixels. Null: on the command line the network's, if it is set, or if it is
            null, too, the common size of the images, see `find_sizes`; otherwise 32.
        channels: 3 for RGB, 1 for grey.
        batch_size: global batch size, over all devices.
        device_batch_size: most images per forward pass on a device, see `ImageData`.
        flip: mirror half of the training images.
        memory_gb: sets of at most this size as uint8, in GiB, are read once and stay in the memory of each process.
        num_workers: reader processes per device for larger sets.
        skip_unreadable: decode all images once and leave out those that cannot be read; the run's folder gets a list of
            them, unread.txt. Otherwise such an image ends the run.
        white: the value that is white in grey images of more than 8 bits, such as 4095 for 12 bits in 16; null: 65,535,
            and 1 in float images.
        seed: random seed of the image order and the flips; the held-out images do not depend on it.
        labels: "auto" takes the labels in a dataset.json (EDM, StyleGAN) or a metadata.jsonl, .csv or .parquet
            (Hugging Face's imagefolder) at the top of the images, or else the class folders; folders that are all
            named by splits, such as train and test, are read as training and test images. "folders" takes the folders
            of the first level, "leaf" the lowest ones; null: no classes. Otherwise a file with the names of images and
            their labels: one of these, or a table (.csv, .tsv, .txt) with a column `file_name` and one of labels, or
            with names in its first column and labels in the second one. Integer labels are class indices, names are
            sorted.
        name_column: column of the names of images in a table or metadata file; null: `file_name`, or the first one.
        label_column: column of the labels in a table or metadata file; null takes the only one.
        test_labels: as `labels`, for test_path; "auto" takes the value of `labels` unless that is a file.
    """

    adjustable = ("image_size", "channels")
    usual_size = 32  # pixels

    def __init__(
        self,
        path: str | Path,
        test_path: str | Path | None = None,
        holdout: Annotated[float, Within("[0, 1)")] = 0.0,
        classes: str | Path | None = None,
        image_size: Side | None = None,
        channels: Channels = 3,
        batch_size: int = 128,
        device_batch_size: int | None = None,
        flip: bool = True,
        memory_gb: Annotated[float, Within("[0, inf)")] = 4.0,
        num_workers: int = 4,
        seed: int = 0,
        labels: str | Path | None = AUTO,
        name_column: str | None = None,
        label_column: str | None = None,
        test_labels: str | Path | None = AUTO,
        skip_unreadable: bool = False,
        white: Annotated[float | None, Within("(0, inf)")] = None,
    ) -> None:
        self._has_size = image_size is not None
        if image_size is None:
            image_size = self.usual_size
        super().__init__(image_size, channels, batch_size, flip, seed, num_workers, device_batch_size)
        self.path = str(path)
        self.test_path = None if test_path is None else str(test_path)
        self.holdout = holdout
        self.memory_gb = memory_gb
        self.skip_unreadable = skip_unreadable
        self.classes = None if classes is None else str(classes)
        self.labels = None if labels is None else str(labels)
        self.name_column = name_column
        self.label_column = label_column
        self.test_labels = None if test_labels is None else str(test_labels)
        self.test_name = self.test_path  # the test images in reports and errors; None for held-out ones
        self.crop: Crop = centre_crop
        self.reading = Reading(white)

    @property
    def name(self) -> str:
        """Name of the training set in reports: the name of the folder or archive, and the class list if any."""
        name = Path(self.path).stem
        if self.classes is not None:
            name += f", classes {self.classes}"
        return name

    def load(self) -> None:
        """List the images, split them, and read the sets that fit into memory."""
        listing, test = self._listed
        self.class_names = listing.class_names
        training, held_out = self._parts
        if test is not None:
            if test.class_names != listing.class_names:
                test = self._adopt_classes(test, listing)
            if test == listing:
                self.warn_of_overlap(f"the test images are the training images, {self.path}")
            elif (shared := name_shared(listing, training, test)) is not None:
                self.warn_of_overlap(f"{self.test_name} and {self.path} share images, such as {shared}")
        self.train = self._train_set(listing, training)
        self.train.has_jpegs = listing.has_jpegs
        if test is not None:
            self.test = self._set(test, list(range(len(test.members))))
            self.test.has_jpegs = test.has_jpegs
        elif held_out:
            self.test = self._set(listing, held_out)
            self.test.has_jpegs = self.train.has_jpegs
        if isinstance(self.train, InMemory):
            self.num_workers = 0
        self._tell_what_was_read(listing, test)

    def _tell_what_was_read(self, training: Listing, test: Listing | None) -> None:
        """Print what was read and what was not; store the list of images that were left out."""
        named = {self.path: training}
        if test is not None:
            named[self.test_name] = test
        lines = [line for listing in named.values() for line in listing.left_out]
        where = self._store_unread(lines) if lines else ""
        for name, listing in named.items():
            rank_zero_info(f"{name}: {describe_listing(listing, self.image_size, where)}")
        warn_of_dark_images(self.path, self.train, "if their files hold 12 bits in 16, set `white` 4095")

    def _store_unread(self, lines: Sequence[str]) -> str:
        """Store a list of images that cannot be read in the folder of the run, on rank 0; return its name.

        The name is empty if the data are not those of a run with a folder.
        """
        if self.find_run_folder is None:
            return ""
        file = self.find_run_folder() / UNREAD
        if rank_zero_only.rank == 0:
            check_writable(file)
            store_list(lines, file)
        return str(file)

    def listings(self) -> tuple[Listing, Listing | None]:
        """List the training images and the test images: of `test_path`, or of the part of `path` for testing."""
        columns = Columns(self.name_column, self.label_column)
        training, test = self._list("path", LabelOptions(self.labels, columns))
        if self.test_path is not None:
            source = self.test_labels
            if source == AUTO and self.labels in (None, FOLDERS, LEAF):
                source = self.labels
            test, _ = self._list("test_path", LabelOptions(source, columns, "test_labels"))
        elif test is not None:
            self.test_name = f"{self.path}/{test.part}"
            if self.holdout:
                remark = f"`holdout` {self.holdout:g} is not used: {self.test_name} has the test images"
                rank_zero_info(with_flags(remark))
        check_columns(columns, training, test)
        return training, test

    def _list(self, argument: str, labels: LabelOptions) -> tuple[Listing, Listing | None]:
        """List the images that `path` or `test_path` names."""
        classes = None if self.classes is None else class_list(self.classes)
        return list_parts(getattr(self, argument), classes, labels, argument)

    def _adopt_classes(self, test: Listing, training: Listing) -> Listing:
        """Return the test images with the class numbers of the training images; by indices they may lack some."""
        adopted = adopt_classes(test, training)
        indices = tuple(map(str, range(len(training.class_names))))  # the class names of integer labels
        are_indices = test.table and training.table and training.class_names == indices
        if adopted is None or (len(test.class_names) < len(training.class_names) and not are_indices):
            raise UserError(f"{self.test_name} and {self.path} have different classes: give test images of the same")
        return adopted

    @cached_property
    def _listed(self) -> tuple[Listing, Listing | None]:
        """The result of `listings`, kept because listing a million files takes seconds."""
        training, test = self.listings()
        if self.skip_unreadable:
            training = leave_out_unreadable(training, self.reading)
            if test is not None:
                test = leave_out_unreadable(test, self.reading)
        return training, test

    @cached_property
    def _parts(self) -> tuple[list[int], list[int]]:
        """Indices of training images and of held-out images, kept because `hold_out` warns."""
        listing, test = self._listed
        if test is not None or self.holdout == 0.0:
            return list(range(len(listing.members))), []
        return hold_out(listing.labels, self.holdout)

    def count_train(self) -> int:
        """Return the number of training images; images are listed, not decoded."""
        training, _ = self._parts
        return len(training)

    def find_sizes(self) -> Sizes:
        """Return the sizes of the data set; images are listed, not decoded.

        Without an `image_size`, it becomes the side of the training images if they are squares of one size, of at most
        MOST_SIDE pixels. The headers of at most MOST_MEASURED images are read, spread evenly.
        """
        listing, _ = self._listed
        if not self._has_size:
            measured = spread(len(listing.members), MOST_MEASURED)
            self.image_size = common_side(listing, measured, MOST_SIDE) or self.usual_size
            self._has_size = True
        return Sizes(self.image_size, self.channels, len(listing.class_names))

    def content_hash(self) -> str:
        """Return a hash of names and sizes of the training files, and of their reading unless it is the default.

        It does not depend on `memory_gb`.
        """
        listing, _ = self._listed
        chosen, _ = self._parts
        return hash_files(listing, chosen) + self.reading.key

    def _train_set(self, listing: Listing, chosen: list[int]) -> ImageSet:
        return self._set(listing, chosen)

    def _set(self, listing: Listing, chosen: list[int]) -> ImageSet:
        size = len(chosen) * self.channels * self.image_size**2  # bytes
        if size <= self.memory_gb * 2**30:
            images = self._read_all(listing, chosen, self.decoding)
            labels = torch.tensor(listing.labels)[chosen]
            return InMemory(images, labels)
        rank_zero_info(f"{len(chosen)} images are decoded whenever they are read")
        self._check_headers(listing, chosen)
        return OnDisk(listing, chosen, self.decoding)

    @property
    def decoding(self) -> Decoding:
        """The decoding of images that are not cropped at random."""
        return Decoding(self.image_size, self.channels, crop=self.crop, reading=self.reading)

    def _read_all(self, listing: Listing, chosen: list[int], decoding: Decoding) -> Tensor:
        """Read images into memory; if some cannot be read, name all of the listing."""
        images, failures = try_read(listing, decoding, chosen)
        if failures:
            failures |= find_failures(listing, self.decoding)
            where = self._store_unread([failures[i] for i in sorted(failures)])
            raise UserError(explain_failures(listing, failures, where=where) + SKIP_HINT)
        return images

    def _check_headers(self, listing: Listing, chosen: list[int]) -> None:
        """Look at the headers of at most MOST_MEASURED images; raise a UserError if some cannot be read."""
        measured = [chosen[row] for row in spread(len(chosen), MOST_MEASURED)]
        check_headers(listing, measured, hint=SKIP_HINT)

    def describe_pictures(self) -> str:
        return f"crop of ADM, {self.image_size}"

    def describe_test_images(self, trained_on: str | None = None) -> str:
        if self.test_name is not None:
            text = self.test_name
        elif trained_on is not None and trained_on == self.fingerprint:
            text = f"a random {self.holdout:.0%} of this data set, which the training of the network held out, too"
        else:
            text = (
                f"a random {self.holdout:.0%} of this data set, held out here; a network trained without this holdout "
                "has already seen these images"
            )
        return self._add_overlap(text)
