"""Random numbers of an image by seed and row: torchvision's boxes, timm's RandAugment and erasing."""

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from image_noise import noise
from PIL import Image
from refusals import raises_user_error
from timm.data.auto_augment import posterize, rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional

from uvit_decay.data.augment import Augment, AugmentDraw, _posterize, erase_boxes, global_seeds, rand_augment

NAME = "rand-m9-mstd0.5-inc1"


def torchvisions_box(monkeypatch, attempts, height, width, augment):
    """RandomResizedCrop.get_params, whose k-th attempt draws these four numbers: area, ratio, top, left."""
    shapes, places = attempts[:, :2].flatten().tolist(), []

    def uniform(x, low, high):
        places[:] = attempts[len(attempts) - (len(shapes) + 1) // 2, 2:]
        return x.fill_(low + (high - low) * shapes.pop(0))

    def randint(low, high, size):
        return torch.tensor([int(places.pop(0) * high)])

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "uniform_", uniform)
        patch.setattr(torch, "randint", randint)
        shape = torch.empty(3, height, width)
        return RandomResizedCrop.get_params(shape, list(augment.crop_scale), list(augment.crop_ratio))


@pytest.mark.parametrize(("height", "width"), [(400, 500), (500, 333), (32, 32), (40, 400), (400, 40), (1, 7)])
def test_boxes_are_those_of_torchvision(monkeypatch, height, width):
    augment = Augment(crop_scale=(0.08, 1.0))
    for seed in range(50):
        attempts = np.random.default_rng(seed).random((10, 4))
        expected = torchvisions_box(monkeypatch, attempts, height, width, augment)
        assert tuple(AugmentDraw(augment, attempts.tolist(), False, [0, 0]).box(height, width)) == tuple(expected)


@pytest.mark.parametrize(("height", "width"), [(400, 500), (32, 32), (40, 400)])
def test_clipped_boxes_are_those_of_the_linear_probe_of_mae(height, width):
    """A single draw, as in its code: the box is cut to the image, then placed."""
    augment, clipped = Augment((0.08, 1.0), crop_clip=True), 0
    for seed in range(50):
        attempts = np.random.default_rng(seed).random((10, 4))
        area, aspect, top, left = attempts[0]
        area = height * width * (0.08 + 0.92 * area)
        ratio = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * aspect)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        clipped += w > width or h > height
        w, h = min(w, width), min(h, height)
        expected = int(top * (height - h + 1)), int(left * (width - w + 1)), h, w
        assert tuple(AugmentDraw(augment, attempts.tolist(), False, [0, 0]).box(height, width)) == expected
    assert clipped


def test_a_row_draws_the_same_in_any_batch():
    rows, augment = torch.arange(100, 140), Augment()
    whole = augment.draws(3, rows)
    assert augment.draws(3, rows[7:9]) == whole[7:9]
    assert augment.draws(4, rows) != whole
    assert 8 < sum(draw.mirror for draw in whole) < 32
    assert not any(draw.mirror for draw in Augment(flip=False).draws(3, rows))


def test_shifts_are_uniform_and_depend_on_the_row_alone():
    rows = torch.arange(2000)
    draws = Augment(shift=2).draws(0, rows)
    counts = Counter(draw.shift for draw in draws)
    assert set(counts) == set(itertools.product(range(-2, 3), repeat=2))
    assert min(counts.values()) > 40  # of 80 expected
    assert Augment(shift=2).draws(0, rows[70:80]) == draws[70:80]
    assert {draw.shift for draw in Augment().draws(0, rows)} == {(0, 0)}


@pytest.mark.parametrize("shift", [(0, 0), (3, -2), (-4, 4), (0, 1)])
def test_a_shifted_image_is_torchvisions_crop_of_the_reflected_padding(shift):
    image = torch.arange(3 * 5 * 6).reshape(3, 5, 6)
    down, right = shift
    padded = functional.pad(image, [4, 4, 4, 4], padding_mode="reflect")
    expected = functional.crop(padded, 4 - down, 4 - right, 5, 6)
    draw = Augment(shift=4).draws(0, torch.zeros(1, dtype=torch.long))[0]._replace(shift=shift)
    assert torch.equal(draw.moved(image), expected)
    np.testing.assert_array_equal(draw.moved(image.numpy()), expected)


def test_rand_augment_is_timms_and_leaves_the_global_generators_as_they_were():
    image = Image.fromarray(noise(48, 48, 3))
    options = {"translate_const": int(48 * 0.45), "img_mean": (124, 116, 104)}
    options["interpolation"] = Image.Resampling.BICUBIC
    timms, changed = rand_augment_transform(NAME, options), 0
    state = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    for seed in range(20):
        with global_seeds([seed, seed + 1]):
            found = np.asarray(rand_augment(NAME, 48, 3)(image))
        with global_seeds([seed, seed + 1]):
            np.testing.assert_array_equal(found, np.asarray(timms(image)))
        changed += not np.array_equal(found, np.asarray(image))
    assert changed > 8
    assert random.getstate() == state[0]
    assert (np.random.get_state()[1] == state[1]).all()  # noqa: NPY002


def test_posterizing_to_no_bits_gives_black_as_with_older_pillow():
    image, black = Image.fromarray(noise(16, 16, 3)), 0
    for seed in range(40):
        with global_seeds([seed, seed]):
            black += not np.asarray(rand_augment("rand-m10-n1-p1-inc1", 16, 3)(image)).any()
    assert black > 0
    for bits in (1, 4, 8):
        found = _posterize(image, bits, resample=None)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(posterize(image, bits)))


def test_rand_augment_takes_grey_images():
    image = Image.fromarray(noise(32, 32))
    for seed in range(60):  # all operations
        with global_seeds([seed, seed]):
            found = rand_augment(NAME, 32, 1)(image)
        assert (found.mode, found.size) == ("L", (32, 32))


def test_erased_rectangles_are_those_of_timm_in_share_size_and_noise():
    mean, deviation = (torch.tensor(part)[:, None, None] for part in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    empty, count = torch.full((3, 40, 48), 7.0), 2000
    found = erase_boxes(empty.expand(count, -1, -1, -1), 0.25, 1, torch.arange(count))
    timms = RandomErasing(0.25, mode="pixel", device="cpu")
    with global_seeds([0, 0]):
        expected = torch.stack([timms(empty.clone()) for _ in range(count)])
    holes, theirs = ((images[:, 0] != 7.0).flatten(1) for images in (found, expected))
    assert abs(holes.any(1).float().mean() - 0.25) < 0.03
    areas, their_areas = (part[part.any(1)].float().mean(1) for part in (holes, theirs))
    quantiles = torch.tensor([0.05, 0.5, 0.95])
    assert torch.allclose(areas.quantile(quantiles), their_areas.quantile(quantiles), atol=0.03)
    normalised = ((found + 1) / 2 - mean) / deviation
    pixels = normalised.movedim(1, 0)[:, (found[:, 0] != 7.0)]
    assert torch.allclose(pixels.mean(1), torch.zeros(3), atol=0.01)
    assert torch.allclose(pixels.std(1), torch.ones(3), atol=0.01)
    assert all(is_rectangle(hole.view(40, 48)) for hole in holes[holes.any(1)][:20])


def is_rectangle(mask):
    rows, columns = mask.any(1), mask.any(0)
    return torch.equal(mask, rows[:, None] & columns)


def test_erasing_depends_on_the_row_alone_and_may_be_off():
    images, rows = torch.zeros(32, 1, 16, 16), torch.arange(50, 82)
    whole = erase_boxes(images, 0.5, 1, rows)
    assert torch.equal(erase_boxes(images[4:9], 0.5, 1, rows[4:9]), whole[4:9])
    assert erase_boxes(images, 0.0, 1, rows) is images
    assert not images.any()
    assert erase_boxes(images, 1.0, 1, rows).flatten(1).any(1).all()


def test_sections_of_rand_augment_that_timm_would_ignore_are_refused():
    with raises_user_error("rand-m9-mstd0.5-inc1"):
        Augment(rand_augment="rand-m9-mtsd0.5")
