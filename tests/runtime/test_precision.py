"""The chosen precision inside, and everything as it was outside."""

import pytest
import torch
from torch import backends

from uvit_decay.runtime.precision import BF16_GAINS, bf16_gain, computing, full_float32

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
        with full_float32(CPU):
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


@pytest.mark.parametrize("way", OLD_WAYS)
def test_the_older_names_follow(way, restored):
    """torch.compile reads these."""
    OLD_WAYS[way]()
    before = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32
    with full_float32(CPU):
        assert torch.get_float32_matmul_precision() == "highest"
        assert not backends.cudnn.allow_tf32
        assert not backends.cuda.matmul.allow_tf32
    after = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32
    assert after == before


def test_an_error_inside_restores_them(restored):
    torch.set_float32_matmul_precision("medium")
    before = settings()
    with pytest.raises(KeyError), full_float32(CPU):
        raise KeyError
    assert settings() == before


@pytest.mark.parametrize(("width", "gain"), [(1, 1.0), (64, 1.0), (96, 1.6), (191, 1.9), (192, 2.2), (1152, 3.1)])
def test_bf16_pays_for_wide_networks_on_cpus_with_amx_alone(width, gain, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    assert bf16_gain(width) == gain
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert bf16_gain(width) == 1.0
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert bf16_gain(width) == 1.0


def test_the_gains_rise_with_the_width():
    assert sorted(BF16_GAINS.items()) == list(BF16_GAINS.items())
    assert sorted(BF16_GAINS.values()) == list(BF16_GAINS.values())
