"""DINOv2 with random weights against the original's function, timm's own network and timm's own loading."""

import hashlib

import inception_files
import numpy as np
import pytest
import timm
import torch
from dinov2_files import DEPTH, HEADS, WIDTH, Original, random_weights
from PIL import Image
from refusals import find_line, raises_user_error
from safetensors.torch import save_file
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as vision

from uvit_decay.encoders import DINOv2, dinov2
from uvit_decay.encoders.dinov2 import positions_at
from uvit_decay.encoders.resize import DINOV2_SIZE, RESIZE_DINOV2


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return random_weights(tmp_path_factory.mktemp("dinov2") / "dinov2_pretrain.pth")


@pytest.fixture(scope="module")
def photographs():
    coarse = torch.rand(3, 3, 9, 9, generator=torch.Generator().manual_seed(1)) * 300 - 20
    return torch.nn.functional.interpolate(coarse, (64, 48), mode="bicubic").round().clamp(0, 255).to(torch.uint8)


def prepared(weights, protocol="dinov2-edm2", **options):
    return inception_files.prepare(DINOv2(str(weights), protocol, **options))


def standardised(pixels):
    return vision.normalize(pixels / 255, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)


def by_torchvision(protocol, images):
    """Preprocess a picture as dgm-eval does, and as EDM2 does with Pillow's filter on float channels."""
    if protocol == "dinov2-dgm":
        size = [DINOV2_SIZE, DINOV2_SIZE]
        pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
        resized = [vision.resize(picture, size, InterpolationMode.BICUBIC) for picture in pictures]
        return torch.stack([standardised(255 * vision.to_tensor(picture)) for picture in resized])
    channels = [[Image.fromarray(channel.float().numpy()) for channel in image] for image in images]
    resized = [[np.asarray(c.resize((224, 224), Image.Resampling.BICUBIC)) for c in image] for image in channels]
    return standardised(torch.from_numpy(np.array(resized)))


@pytest.mark.parametrize("protocol", RESIZE_DINOV2)
def test_features_are_those_of_the_original(protocol, weights, photographs):
    extractor = prepared(weights, protocol)
    actual = extractor(photographs)
    assert (extractor.name, extractor.widths) == (f"{protocol}-{WIDTH}x{DEPTH}", {"features": WIDTH})
    assert (actual.logits, actual.spatial) == (None, None)
    expected = Original(weights)(by_torchvision(protocol, photographs))
    assert (actual.features - expected).norm() < 1e-4 * expected.norm()
    assert expected.std(dim=0).mean() > 0.01  # they depend on the pictures


def test_protocols_differ_by_rounding_and_clamping(photographs):
    edm2, dgm = (RESIZE_DINOV2[name](photographs) for name in ("dinov2-edm2", "dinov2-dgm"))
    assert 0.1 < (edm2 - dgm).abs().mean() < 0.4  # grey levels
    assert edm2.min() < 0  # as in EDM2, overshoot stays
    assert torch.equal(dgm, dgm.round())
    square = torch.randint(256, (2, 3, 224, 224), dtype=torch.uint8)
    assert all(torch.equal(resize(square), square.float()) for resize in RESIZE_DINOV2.values())


def timms_own(path):
    """timm's network with the weights of a file, read by timm."""
    sizes = {"img_size": 224, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
    overlay = {"file": str(path), "hf_hub_id": None, "url": ""}
    options = {"pretrained": True, "pretrained_cfg_overlay": overlay, "num_classes": 0}
    return timm.create_model("vit_large_patch14_dinov2.lvd142m", **sizes, **options).eval()


def test_a_file_of_timm_has_timms_features_and_the_hash_of_the_original(tmp_path, photographs):
    original = random_weights(tmp_path / "dinov2.pth", side=16)
    state = torch.load(original, weights_only=True)
    del state["mask_token"]
    save_file(state, tmp_path / "model.safetensors")
    extractor = prepared(tmp_path / "model.safetensors", "dinov2-dgm")
    with torch.no_grad():
        expected = timms_own(original)(by_torchvision("dinov2-dgm", photographs))
    actual = extractor(photographs).features
    assert (actual - expected).norm() < 1e-4 * expected.norm()
    content = b"".join(name.encode() + state[name].numpy().tobytes() for name in sorted(state))
    assert extractor.sha256 == prepared(original).sha256 == hashlib.sha256(content).hexdigest()
    assert extractor.fingerprint() == f"dinov2-dgm-{WIDTH}x{DEPTH}-{extractor.sha256[:12]}"
    find_line(extractor.remark(), "DINOv2", extractor.sha256)


def test_positions_are_sampled_once_and_not_as_timm_does(weights):
    """As the original does: see the test of its features."""
    positions = torch.load(weights, weights_only=True)["pos_embed"]
    actual = positions_at(positions, 16)
    assert torch.equal(actual[:, :1], positions[:, :1])
    assert positions_at(actual, 16) is actual
    assert (timms_own(weights).pos_embed - actual).norm() > 0.1 * actual.norm()


def test_grey_images_precisions_and_batches(weights, photographs, monkeypatch):
    extractor = prepared(weights)
    grey = photographs[:, :1]
    assert torch.equal(extractor(grey).features, extractor(grey.expand(-1, 3, -1, -1)).features)
    whole = extractor(photographs).features
    monkeypatch.setattr(DINOv2, "at_once", 2)
    torch.testing.assert_close(extractor(photographs).features, whole)
    compiled = prepared(weights, compile="eager")
    torch.testing.assert_close(compiled(photographs).features, whole)
    narrow = prepared(weights, precision="bf16")
    assert narrow.name == f"dinov2-edm2-{WIDTH}x{DEPTH}-bf16"
    difference = (narrow(photographs).features - whole).norm() / whole.norm()
    assert 1e-6 < difference < 0.05
    assert DINOv2(str(weights)).name == "dinov2-edm2"  # that of ViT-L, until the file is read


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cls_token": None}, ("DINOv2", "'cls_token'")),
        ({"register_tokens": torch.zeros(1, 4, WIDTH)}, "register_tokens"),
        ({"norm.bias": torch.zeros(3)}, ("norm.bias", "(3,)", "(128,)")),
        ({"norm.bias": torch.full((WIDTH,), torch.nan)}, ("norm.bias", "NaN")),
    ],
)
def test_what_is_no_dinov2_is_one_line(changes, message, weights, tmp_path):
    state = {**torch.load(weights, weights_only=True), **changes}
    torch.save({name: value for name, value in state.items() if value is not None}, tmp_path / "other.pth")
    with raises_user_error("other.pth", message):
        prepared(tmp_path / "other.pth")


def test_timms_file_is_taken_from_the_cache_of_the_hub(tmp_path, monkeypatch, weights, photographs):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    extractor = DINOv2()
    assert extractor.missing() == "DINOv2's weights (timm/vit_large_patch14_dinov2.lvd142m)"
    with raises_user_error("DINOv2", "`dinov2_weights`"):
        inception_files.prepare(extractor)
    repository = tmp_path / "hub" / f"models--{dinov2.REPOSITORY.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    save_file(torch.load(weights, weights_only=True), repository / "snapshots" / "abc" / dinov2.FILE)
    assert extractor.missing() is None
    inception_files.prepare(extractor)
    assert torch.equal(extractor(photographs).features, prepared(weights)(photographs).features)
