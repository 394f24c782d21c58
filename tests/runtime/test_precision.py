"""The chosen precision inside, and everything as it was outside."""

import pytest
import torch
from torch import backends

from uvit_decay.runtime import precision
from uvit_decay.runtime.precision import computing

CPU = torch.device("cpu")
KNOBS = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
OLD_WAYS = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "cuda.matmul.allow_tf32": lambda: setattr(backends.cuda.matmul, "allow_tf32", True),
    "cudnn.allow_tf32": lambda: setattr(backends.cudnn, "allow_tf32", True),
}
NEW_WAYS = {
    "cuda.matmul": lambda: setattr(backends.cuda.matmul, "fp32_precision", "tf32"),
    "cudnn.conv": lambda: setattr(backends.cudnn.conv, "fp32_precision", "tf32"),
    "mkldnn.matmul": lambda: setattr(backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "mkldnn.conv": lambda: setattr(backends.mkldnn.conv, "fp32_precision", "bf16"),
}


def settings():
    return [knob.fp32_precision for knob in KNOBS]


@pytest.fixture
def restored():
    before = settings()
    matmul, cudnn = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32  # others may have set them
    yield
    torch.set_float32_matmul_precision(matmul)
    backends.cudnn.allow_tf32 = cudnn
    for knob, value in zip(KNOBS, before, strict=True):
        knob.fp32_precision = value


@pytest.mark.parametrize("way", OLD_WAYS | NEW_WAYS)
def test_whatever_was_set_is_off_inside_and_back_after(way, restored):
    (OLD_WAYS | NEW_WAYS)[way]()
    before = settings()
    with torch.autocast("cpu", torch.bfloat16):
        with computing(CPU, "float32"):
            assert settings() == ["ieee"] * 4
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    assert settings() == before


@pytest.mark.parametrize(
    ("precision", "gpu", "old", "linear"),
    [
        ("float32", "ieee", "highest", torch.float32),
        ("tf32", "tf32", "high", torch.float32),
        ("bf16", "ieee", "highest", torch.bfloat16),
    ],
)
def test_each_precision_has_its_settings(precision, gpu, old, linear, restored):
    before = settings()
    with computing(CPU, precision):
        assert settings() == [gpu, gpu, "ieee", "ieee"]
        assert torch.get_float32_matmul_precision() == old
        assert torch.nn.functional.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype == linear
    assert settings() == before


@pytest.mark.parametrize("way", ["high", "cudnn.allow_tf32"])
def test_the_older_names_follow(way, restored):
    """torch.compile reads these."""
    OLD_WAYS[way]()
    before = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32
    with computing(CPU, "float32"):
        assert torch.get_float32_matmul_precision() == "highest"
        assert not backends.cudnn.allow_tf32
        assert not backends.cuda.matmul.allow_tf32
    after = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32
    assert after == before


def test_an_error_inside_restores_them(restored):
    torch.set_float32_matmul_precision("medium")
    before = settings()
    with pytest.raises(KeyError), computing(CPU, "float32"):
        raise KeyError
    assert settings() == before


@pytest.mark.parametrize(("width", "times", "faster"), [(95, 3.0, False), (96, 1.6, True), (512, 1.2, False)])
def test_wide_networks_train_in_bf16_where_its_products_are_faster(width, times, faster, monkeypatch):
    """AMX or not: what a product takes decides."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: not faster, raising=False)
    monkeypatch.setattr(precision, "product_ratio", lambda: times)
    assert precision.trains_in_bf16(width) == faster


def test_the_ratio_is_one_of_products_of_this_machine():
    assert 0.01 < precision.product_ratio() < 100
