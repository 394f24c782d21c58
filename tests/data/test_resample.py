"""Parts of a batch, scaled on its device, are those that torchvision cuts out of each image with PIL."""

import numpy as np
import pytest
import torch
from image_noise import noise
from PIL import Image
from torchvision.transforms import InterpolationMode, functional

from uvit_decay.data.augmented import resampled

BOXES = [(0, 0, 32, 32), (3, 5, 20, 27), (11, 0, 9, 32), (24, 24, 8, 8), (0, 31, 32, 1), (7, 9, 17, 5)]


def by_torchvision(image, box, size):
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    cropped = functional.resized_crop(picture, *box, [size, size], InterpolationMode.BICUBIC)
    return torch.from_numpy(np.array(cropped)).permute(2, 0, 1)


def scaled(images, size=32, **options):
    boxes = torch.tensor(BOXES)
    return resampled(images, boxes[:, :2], boxes[:, 2:], size, **options)


@pytest.mark.parametrize("size", [32, 40])
def test_crops_of_a_batch_are_those_of_torchvision(size):
    images = torch.from_numpy(noise(len(BOXES), 3, 32, 32))
    for image, box, found in zip(images, BOXES, scaled(images, size), strict=True):
        off = (found.int() - by_torchvision(image, box, size).int()).abs()
        assert off.max() <= 2
        assert (off > 0).float().mean() < 0.02


def test_crops_that_shrink_are_antialiased():
    images = torch.from_numpy(noise(1, 3, 64, 64) // 2 + 64)  # no value is clipped between the passes
    found = resampled(images, torch.tensor([[4, 2]]), torch.tensor([[50, 60]]), 16)
    off = (found[0].int() - by_torchvision(images[0], (4, 2, 50, 60), 16).int()).abs()
    assert off.max() <= 1


def test_mirroring_is_of_the_crop():
    images, mirror = torch.from_numpy(noise(len(BOXES), 1, 32, 32)), torch.arange(len(BOXES)) % 2 == 1
    plain, found = scaled(images), scaled(images, mirror=mirror)
    assert torch.equal(found, torch.where(mirror[:, None, None, None], plain.flip(-1), plain))


def test_a_crop_does_not_depend_on_the_batch():
    images = torch.from_numpy(noise(len(BOXES), 3, 32, 32))
    for i, (box, found) in enumerate(zip(BOXES, scaled(images), strict=True)):
        part = torch.tensor([box])
        assert torch.equal(resampled(images[i : i + 1], part[:, :2], part[:, 2:], 32)[0], found)
