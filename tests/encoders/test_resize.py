"""The resizes against the libraries whose numbers they are to match, enlarging and shrinking."""

import numpy as np
import pytest
import torch
from PIL import Image

from uvit_decay.encoders.resize import RESIZE, SIZE

SIZES = [(8, 8), (64, 48), (420, 512)]


@pytest.fixture(params=SIZES, ids=str)
def images(request):
    g = torch.Generator().manual_seed(0)
    return torch.randint(256, (2, 3, *request.param), generator=g, dtype=torch.uint8)


def test_clean_is_pillow_on_float_channels(images):
    """clean-fid's resizer: each channel as Pillow's mode F, bicubic, clipped and not rounded."""
    theirs = np.stack(
        [
            [np.asarray(Image.fromarray(c.float().numpy()).resize((SIZE, SIZE), Image.Resampling.BICUBIC)) for c in x]
            for x in images
        ]
    )
    ours = RESIZE["clean"](images) * 128 + 128
    assert np.abs(ours.numpy() - theirs.clip(0, 255)).max() < 1e-3 * 255
    assert ours.min() >= 0
    assert ours.max() <= 255


@pytest.mark.parametrize("name", RESIZE)
def test_black_and_white_are_the_ends(name):
    """255 is 1 in pytorch-fid and 127/128 in the others."""
    ends = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 20, 30)
    out = RESIZE[name](ends)
    assert out.shape == (2, 3, SIZE, SIZE)
    white = 1 if name == "pytorch-fid" else 127 / 128
    torch.testing.assert_close(out[:, 0, 0, 0], torch.tensor([-1.0, white]))
    torch.testing.assert_close(out.amax((1, 2, 3)), out.amin((1, 2, 3)))
