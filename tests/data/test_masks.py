"""Masks of images: found by name, cropped as the images are."""

import numpy as np
import pytest
from PIL import Image

from uvit_decay.data.decoding import centre_crop
from uvit_decay.data.image_files import list_images
from uvit_decay.data.masks import Masks


@pytest.mark.parametrize(("width", "height"), [(8, 8), (40, 48), (17, 9), (100, 33), (5, 7)])
def test_masks_are_cropped_as_images_are(tmp_path, width, height):
    """A mask that is its own image, of four large areas, agrees with it wherever the image is not blended."""
    values = np.zeros((height, width), dtype=np.uint8)
    values[height // 3 :, :] += 100
    values[:, width // 3 :] += 50
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
        Image.fromarray(values).save(tmp_path / folder / "a.png")
    actual = Masks.of(tmp_path / "masks", list_images(tmp_path / "images")).read([0], 8)
    expected = np.asarray(centre_crop(Image.fromarray(values), 8)).astype(int)
    assert actual.shape == (1, 8, 8)
    assert (np.abs(actual[0].numpy() - expected) < 25).mean() > 0.6
    if (width, height) == (8, 8):
        assert (actual[0].numpy() == expected).all()


def test_palettes_are_classes_and_only_images_with_masks_are_taken(tmp_path):
    for name in ("left/02.jpg", "right/03.png", "right/05.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / "images" / name)
    mask = Image.fromarray(np.full((8, 8), 2, dtype=np.uint8), mode=None)
    mask.putpalette([9, 9, 9, 200, 0, 0, 0, 200, 0])
    (tmp_path / "masks" / "right").mkdir(parents=True)
    mask.save(tmp_path / "masks" / "right" / "03.png")
    actual = Masks.of(tmp_path / "masks", list_images(tmp_path / "images"))
    assert [actual.listing.members[i] for i in actual.members] == ["right/03.png"]
    assert (actual.read(actual.members, 8) == 2).all()
