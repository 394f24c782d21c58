"""The chosen precision inside, and everything as it was outside."""

from contextlib import suppress

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
def test_whatever_was_set_is_off_inside_and_back_after_also_after_an_error(way, restored):
    (OLD_WAYS | NEW_WAYS)[way]()
    before = settings()
    with torch.autocast("cpu", torch.bfloat16):
        with suppress(KeyError), computing(CPU, "float32"):
            assert settings() == ["ieee"] * 4
            assert not torch.is_autocast_enabled("cpu")
            raise KeyError
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


@pytest.mark.parametrize(
    ("features", "width", "faster"),
    [
        (["avx2", "amx_bf16"], 96, True),
        (["avx512_bf16"], 384, True),
        (["avx512_bf16"], 95, False),
        (["avx2"], 384, False),
    ],
)
def test_bfloat16_is_faster_for_wide_networks_on_cpus_with_instructions(features, width, faster, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"flags : {' '.join(features)}")
    monkeypatch.setattr(precision, "Path", lambda _: tmp_path / "cpuinfo")
    assert precision.trains_in_bf16(width) == faster
