"""Fingerprints of training images: equal for the same images anywhere, different for others of the same counts."""

import shutil
from dataclasses import replace

import pytest
import torch
from image_noise import tree, turn, write_tar, write_zip
from refusals import raises_user_error

from uvit_decay.data import AugmentedImages, Digits, Images, Latents
from uvit_decay.data.batches import ImageSet, InMemory
from uvit_decay.data.fingerprint import spread

NAMES = [f"{kind}/{i}.bmp" for kind in ("cat", "dog") for i in range(4)]


def print_of(path, **options):
    data = Images(str(path), image_size=8, batch_size=2, **options)
    data.setup()
    return data.fingerprint


def test_another_zip_of_the_same_names_and_sizes_has_another_fingerprint(tmp_path):
    folder = tree(tmp_path / "one", NAMES)
    before = print_of(write_zip(folder, tmp_path / "one.zip"))
    shutil.copy(tmp_path / "one.zip", tmp_path / "moved.zip")
    assert print_of(tmp_path / "moved.zip") == before
    turn(folder / "cat" / "2.bmp")
    after = print_of(write_zip(folder, tmp_path / "two.zip"))
    assert after != before


@pytest.mark.parametrize("pack", [lambda folder, file: folder, write_tar, write_zip])
def test_names_and_sizes_count_and_places_do_not(tmp_path, pack):
    folder = tree(tmp_path / "one", NAMES)
    before = print_of(pack(folder, tmp_path / "one.archive"))
    shutil.copytree(folder, tmp_path / "copy" / "deeper")
    assert print_of(pack(tmp_path / "copy", tmp_path / "copy.archive")) == before
    larger = tree(tmp_path / "larger", NAMES)
    tree(larger, NAMES[-1:], size=9)
    assert print_of(pack(larger, tmp_path / "larger.archive")) != before
    (folder / "cat" / "2.bmp").rename(folder / "cat" / "2b.bmp")
    assert print_of(pack(folder, tmp_path / "renamed.archive")) != before


def test_the_held_out_images_do_not_count_readings_do_and_memory_and_crops_do_not_matter(tmp_path):
    folder = tree(tmp_path / "one", NAMES)
    first = print_of(folder)
    assert print_of(folder, memory_gb=0.0) == first
    assert print_of(folder, holdout=0.5) != first
    assert print_of(folder, white=4095.0) != first
    data = AugmentedImages(str(folder), image_size=8, batch_size=2)
    data.setup()
    assert data.fingerprint == first


@pytest.mark.parametrize(("total", "most"), [(3, 5), (5, 5), (1_281_167, 10_000)])
def test_a_spread_has_both_ends_and_no_index_twice(total, most):
    chosen = spread(total, most)
    assert (len(set(chosen)), chosen[0], chosen[-1]) == (min(total, most), 0, total - 1)


def test_arrays_are_compared_by_all_their_values():
    data, other = Digits(), Digits()
    data.setup()
    other.load()
    other.train.images[1000, 0, 3, 3] ^= 1
    assert data.fingerprint != other.fingerprint


def test_a_set_of_the_users_is_compared_by_some_of_its_images():
    class Doubled(ImageSet):
        def __init__(self, images):
            self.images, self.labels = images, torch.zeros(len(images), dtype=torch.int64)

        def __getitem__(self, indices):
            return self.images[indices] * 2, self.labels[indices]

    images = torch.arange(100 * 4, dtype=torch.uint8).reshape(100, 1, 2, 2)
    first = Doubled(images).content_hash()
    assert first == InMemory(images[spread(100, 64)] * 2, torch.zeros(64)).content_hash()
    assert first != Doubled(images + 1).content_hash()


def test_latents_are_compared_by_their_settings_and_statistics(encoded, tmp_path):
    shutil.copytree(encoded, tmp_path / "moved")
    prints = []
    for path in (encoded, tmp_path / "moved"):
        data = Latents(str(path), batch_size=2)
        data.setup()
        prints.append(data.fingerprint)
    assert prints[0] == prints[1]
    manifest = data.train.manifest
    shifted = tuple(value + 1e-3 for value in manifest.statistics.mean)
    other = replace(manifest, statistics=replace(manifest.statistics, mean=shifted))
    assert replace(manifest, source="elsewhere").content_hash == manifest.content_hash != other.content_hash


def test_test_images_that_are_training_images_are_found(tmp_path):
    train = tree(tmp_path / "train", NAMES)
    same, copied, other = tmp_path / "link", tmp_path / "copied", tmp_path / "other"
    same.symlink_to(train)
    shutil.copytree(train, copied)
    (copied / "cat" / "0.bmp").write_bytes((train / "dog" / "0.bmp").read_bytes())  # all others are still shared
    for path in tree(other, NAMES).rglob("*.bmp"):
        turn(path)  # other images of the same names and sizes
    overlaps = []
    for test in (
        train,
        same,
        copied,
        other,
        write_zip(train, tmp_path / "train.zip"),
        write_tar(other, tmp_path / "o.tar"),
    ):
        data = Images(str(train), str(test), image_size=8, batch_size=2)
        data.setup()
        overlaps.append(data.overlap)
        assert data.overlap in data.describe_test_images()
    assert [bool(overlap) for overlap in overlaps] == [True, True, True, False, True, False]
    data = Images(str(train), holdout=0.5, image_size=8, batch_size=2)
    data.setup()
    assert data.overlap == ""


def test_latents_of_the_same_images_are_found(encoded, tmp_path):
    shutil.copytree(encoded, tmp_path / "copied")
    data = Latents(str(encoded), test_path=str(tmp_path / "copied"), batch_size=2)
    data.setup()
    assert data.overlap


@pytest.mark.parametrize(("holdout", "count"), [(0.05, "0 of 8"), (0.95, "8 of 8")])
def test_a_holdout_that_leaves_a_part_empty_is_refused(tmp_path, holdout, count):
    data = Images(str(tree(tmp_path, NAMES)), holdout=holdout, image_size=8, batch_size=2)
    with raises_user_error("`holdout`", "`test_path`", count):
        data.setup()
