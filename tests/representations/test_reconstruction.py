"""Reconstructions: what is visible is the image, what is removed is the decoder's, and masks stay the same."""

import pytest
import torch
from conftest import tiny_net
from refusals import raises_user_error

from uvit_decay.nn import MAE
from uvit_decay.representations.reconstruction import Reconstructor


def tiny_mae(**options):
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": 2, "heads": 2, "decoder_dim": 16, "decoder_depth": 2, "decoder_heads": 2}
    return MAE(16, 4, 3, **{**sizes, "zero_init": False, **options}).eval()


def images(count=5):
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1


def levels(x):
    return ((x + 1) * 127.5).clamp(0, 255).round()


@pytest.mark.parametrize("norm_pix", [True, False])
def test_exact_predictions_reconstruct_the_image(norm_pix, monkeypatch):
    """Normalised patches get the mean and the variance of the image's own back."""
    net, x = tiny_mae(norm_pix=norm_pix), images()
    monkeypatch.setattr(net, "forward", lambda x, noise, ratio: (net.targets(x), net.masking(noise, ratio).mask))
    whole, masked, restored = Reconstructor(net)(x, range(5)).unbind(1)
    assert torch.equal(whole.float(), levels(x))
    assert (restored.float() - levels(x)).abs().max() <= 1
    assert not torch.equal(masked, whole)


def test_removed_patches_are_grey_and_then_the_decoders():
    net, x = tiny_mae(), images()
    whole, masked, restored = Reconstructor(net, mask_ratio=0.6, seed=3)(x, range(5)).unbind(1)
    grey = (masked == 128).all(dim=1)
    cells = grey.unfold(1, 4, 4).unfold(2, 4, 4).flatten(3).float().mean(dim=3)
    assert set(cells.unique().tolist()) == {0.0, 1.0}
    assert (cells.sum(dim=(1, 2)) == 16 - int(16 * 0.4)).all()
    visible = ~grey[:, None].expand_as(whole)
    assert torch.equal(masked[visible], whole[visible])
    assert torch.equal(restored[visible], whole[visible])
    assert (restored[~visible] != whole[~visible]).float().mean() > 0.9


def test_masks_depend_on_seed_and_image_alone():
    net, x = tiny_mae(), images()
    whole = Reconstructor(net)(x, range(5))
    parts = torch.cat([Reconstructor(net)(x[i : i + 2], range(5)[i : i + 2]) for i in (0, 2, 4)])
    assert (whole.float() - parts.float()).abs().max() <= 1
    assert torch.equal(whole[:, :2], parts[:, :2])
    assert not torch.equal(Reconstructor(net, seed=1)(x, range(5))[:, 1], whole[:, 1])
    pictures = [Reconstructor(net).picture(lambda part: x[part], range(5), size) for size in (2, 5)]
    assert pictures[0].size == pictures[1].size == (3 * 100 + 4, 22 + 5 * 100 + 4)


def test_a_network_without_a_decoder_and_masks_of_nothing_are_one_line():
    with raises_user_error("UViT", "decoder"):
        Reconstructor(tiny_net())
    with raises_user_error("`mask_ratio`", 0.99):
        Reconstructor(tiny_mae(), 0.99)
