"""Features of models that are not ours, by the names of their modules."""

import pytest
import timm
import torch

from uvit_decay import decay
from uvit_decay.nn.intermediates import module_features
from uvit_decay.representations.knn import knn_accuracy
from uvit_decay.representations.probe import logistic_grid

NAMES = [f"blocks.{i}" for i in range(3)]


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    options = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 0}
    return timm.models.vision_transformer.VisionTransformer(**options).eval()


@torch.no_grad()
def test_features_are_the_mean_patch_tokens_of_the_named_blocks(vit):
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = module_features(vit, NAMES, lambda: vit(x), num_prefix_tokens=1)
    states = vit.forward_intermediates(x, intermediates_only=True, output_fmt="NLC")
    torch.testing.assert_close(found, torch.stack([state.mean(dim=1) for state in states]))
    assert not any(module._forward_hooks for module in vit.modules())
    with decay.attach(vit, 0.7):
        assert not torch.allclose(module_features(vit, NAMES, lambda: vit(x), num_prefix_tokens=1), found)


def test_a_foreign_model_is_probed(vit):
    random = torch.Generator().manual_seed(1)
    labels = torch.randint(3, (240,), generator=random)
    x = torch.randn(240, 3, 16, 16, generator=random)
    x += 2 * torch.nn.functional.one_hot(labels, 3)[:, :, None, None]  # the class is a colour
    features = module_features(vit, NAMES, lambda: vit(x), num_prefix_tokens=1)
    sides = (features[:, :160], labels[:160], features[:, 160:], labels[160:])
    assert (logistic_grid(*sides).test > 0.9).all()
    assert (knn_accuracy([sides[0]], *sides[1:], k=5) > 0.9).all()


def test_a_module_that_is_not_called_is_named(vit):
    with pytest.raises(KeyError, match="blocks.0"):
        module_features(vit, NAMES, lambda: None)
