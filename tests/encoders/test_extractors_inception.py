"""Inception with random weights against torch-fidelity's own extractor and against the same protocols by hand."""

import pytest
import torch
import torch.nn.functional as F
from inception_files import prepare, random_weights
from refusals import raises_user_error
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from uvit_decay.encoders import Inception
from uvit_decay.encoders.extractors import Features
from uvit_decay.encoders.resize import RESIZE


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return random_weights(tmp_path_factory.mktemp("inception") / "weights.pth")


@pytest.fixture(scope="module")
def theirs(weights):
    """torch-fidelity's network with these weights."""
    return FeatureExtractorInceptionV3("inception-v3-compat", ["2048", "logits_unbiased"], str(weights))


def opened(weights, protocol="adm", **options):
    return prepare(Inception(str(weights), protocol, **options))


@pytest.fixture(scope="module")
def inception(weights):
    return opened(weights, spatial=True)


@pytest.fixture(scope="module")
def photographs():
    g = torch.Generator().manual_seed(1)
    return torch.randint(256, (2, 3, 32, 32), generator=g, dtype=torch.uint8)


@pytest.fixture(scope="module")
def outputs(inception, photographs):
    return inception(photographs)


def same(one: Features, other: Features):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def close(one, other, limit=1e-5):
    return (one - other).norm() <= limit * other.norm()


def by_hand(theirs, x):
    """Return features of 299x299 images in [-1, 1], and the activations of Mixed_6d's first branch."""
    kept = []
    handle = theirs.Mixed_6d.branch1x1.register_forward_hook(lambda module, args, output: kept.append(output))
    names = [name for name, _ in theirs.named_children() if name != "fc"]
    try:
        for name in names:
            x = getattr(theirs, name)(x)
    finally:
        handle.remove()
    assert names[0] == "Conv2d_1a_3x3"
    assert names[-1] == "AvgPool"
    return x.flatten(1), kept[0]


def test_adm_is_the_extractor_of_torch_fidelity(theirs, photographs, outputs):
    features, logits = theirs(photographs)
    assert close(outputs.features, features)
    assert close(outputs.logits, logits)


def test_pytorch_fid_is_its_preprocessing_before_the_same_network(weights, theirs, photographs):
    """As its inception.py does it: images in [0, 1], resized, then from (0, 1) to (-1, 1)."""
    extractor = opened(weights, "pytorch-fid")
    x = F.interpolate(photographs.float().div(255), size=(299, 299), mode="bilinear", align_corners=False)
    assert close(extractor(photographs).features, by_hand(theirs, 2 * x - 1)[0])
    assert extractor(photographs).spatial is None
    assert Inception(str(weights)).name == extractor.name == "inception-v3-pytorch-fid"


def test_spatial_features_are_seven_channels_of_6d_channels_last(theirs, photographs, outputs):
    _, first_branch = by_hand(theirs, RESIZE["adm"](photographs))
    assert first_branch.shape == (2, 192, 17, 17)
    assert outputs.spatial.shape == (2, 2023)
    assert close(outputs.spatial.view(2, 17, 17, 7)[:, 3, 5], first_branch[:, :7, 3, 5])
    assert close(outputs.spatial, first_branch.permute(0, 2, 3, 1)[..., :7].reshape(2, -1))
    assert outputs.spatial.min() == 0


def test_features_tell_images_apart_and_the_network_is_frozen_and_loaded_once(outputs, inception, photographs):
    grey = photographs[:1, :1]
    assert same(inception(grey), inception(grey.expand(-1, 3, -1, -1)))
    assert outputs.features.shape == (2, inception.widths["features"]) == (2, 2048)
    assert outputs.logits.shape == (2, 1008)
    assert {x.dtype for x in outputs} == {torch.float32}
    assert not any(x.requires_grad or x.is_inference() for x in outputs)
    assert (outputs.features[0] - outputs.features[1]).norm() > 0.01 * outputs.features[0].norm() > 0
    net = inception.net
    assert prepare(inception).net is net
    assert not any(p.requires_grad for p in net.parameters())
    assert not any(module.training for module in net.modules())


def test_images_are_taken_a_few_at_a_time(inception, photographs, outputs, monkeypatch):
    monkeypatch.setattr(Inception, "at_once", 1)
    parts = inception(photographs)
    assert all(close(a, b) for a, b in zip(parts, outputs, strict=True))
    assert [len(x) for x in inception(photographs[:0])] == [0, 0, 0]


def test_autocast_and_reduced_precision_around_it_change_nothing(inception, photographs, outputs):
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert same(inception(photographs), outputs)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_bf16_is_asked_for_and_named_and_near_and_tf32_is_of_gpus(weights, photographs, outputs):
    narrow = opened(weights, spatial=True, precision="bf16")
    found = narrow(photographs)
    assert narrow.name == "inception-v3-adm-bf16"
    for one, other in zip(found, outputs, strict=True):
        assert one.dtype == torch.float32
        assert not torch.equal(one, other)
        assert close(one, other, 0.02)
    with raises_user_error("tf32", "CUDA"):
        opened(weights, precision="tf32")
