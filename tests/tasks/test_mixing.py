"""Mixup and CutMix of neighbours: proportions, targets, keys."""

import numpy as np
import pytest
import torch
from small_vit import batch

from uvit_decay.tasks.classify import Mixing


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_images_are_mixed_with_their_neighbours_alike_in_any_pieces(mixup, cutmix):
    mixing = Mixing(mixup, cutmix, 0.5, 0.1, 10, seed=0)
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    images, targets = mixing(batch(16))
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002
    for first in (0, 8):
        part = mixing(batch(8, first=first))
        assert torch.equal(part[0], images[first : first + 8])
        assert torch.equal(part[1], targets[first : first + 8])
    assert not torch.equal(mixing(batch(16, number=4))[1], targets)
    whole = batch(16)
    smooth = 0.9 * torch.nn.functional.one_hot(whole.labels, 10) + 0.01
    neighbours = smooth.reshape(8, 2, 10).flip(1).reshape(16, 10)
    different = (whole.labels.reshape(8, 2)[:, 0] != whole.labels.reshape(8, 2)[:, 1]).repeat_interleave(2)
    share = ((targets - neighbours) / (smooth - neighbours))[different].nanmean(dim=1)
    assert torch.allclose(share, share[0].expand_as(share), atol=1e-5)
    assert torch.allclose(targets, share[0] * smooth + (1 - share[0]) * neighbours, atol=1e-6)
    other = whole.images.reshape(8, 2, 1, 8, 8).flip(1).reshape(16, 1, 8, 8)
    if not cutmix:
        assert torch.allclose(images, share[0] * whole.images + (1 - share[0]) * other, atol=1e-6)
    if not mixup:
        own = images == whole.images
        assert torch.equal(own | (images == other), torch.ones_like(own))
        assert own.float().mean() == pytest.approx(float(share[0]), abs=1e-6)


@pytest.mark.parametrize("switch_prob", [0.0, 1.0])
def test_cutmix_takes_the_place_of_mixup_with_the_given_probability(switch_prob):
    mixing = Mixing(0.8, 1.0, switch_prob, 0.0, 10, seed=0)
    for number in range(8):
        whole = batch(16, number=number)
        other = whole.images.reshape(8, 2, 1, 8, 8).flip(1).reshape(16, 1, 8, 8)
        images, _ = mixing(whole)
        assert bool(((images == whole.images) | (images == other)).all()) == (switch_prob == 1.0)
