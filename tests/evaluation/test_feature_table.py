"""Protocols by name: each gives its extractor, by itself, and its numbers have its name."""

import json
from typing import get_args

import pytest
import torch
import torch_fidelity
from conftest import ROOT
from dinov2_files import DEPTH, WIDTH, Original, random_weights
from evaluations import evaluate, refused

from uvit_decay.evaluation.feature_table import EXTRACTORS, PROTOCOLS, FeatureOptions
from uvit_decay.image_io import save_pngs
from uvit_decay.metrics import DINOv2, Inception, SmallClassifier
from uvit_decay.metrics.resize import DINOv2Protocol, Protocol

COUNT, SUBSET = 12, 8
THEIRS = {
    "fdd": "frechet_inception_distance",
    "kdd": "kernel_inception_distance_mean",
    "kdd_std": "kernel_inception_distance_std",
    "precision": "precision",
    "recall": "recall",
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_alone_is_enough(name):
    extractor = FeatureOptions(protocol=name).extractor(spatial=False)
    assert isinstance(extractor, {"inception": Inception, "dinov2": DINOv2}[PROTOCOLS[name].features])
    assert extractor.protocol == name
    assert name in extractor.name
    with_both = FeatureOptions(features=PROTOCOLS[name].features, protocol=name).extractor(spatial=False)
    assert with_both.name == extractor.name


def test_the_table_has_the_protocols_of_the_extractors_and_the_page_has_the_table():
    assert list(PROTOCOLS) == [*get_args(Protocol), *get_args(DINOv2Protocol)]
    assert {protocol.features for protocol in PROTOCOLS.values()} < set(EXTRACTORS)
    page = (ROOT / "docs" / "evaluation.md").read_text()
    for name, protocol in PROTOCOLS.items():
        assert f"| `{name}` | {protocol.features} | {protocol.resize} | {protocol.reproduces} |" in page


def test_defaults_are_what_they_were():
    assert FeatureOptions().extractor(spatial=True).name == "inception-v3-pytorch-fid"
    assert FeatureOptions(features="inception", protocol="adm").extractor(spatial=False).name == "inception-v3-adm"
    assert FeatureOptions(features="dinov2").extractor(spatial=False).name == "dinov2-edm2"
    for protocol in (None, "adm"):
        extractor = FeatureOptions(features="digits", protocol=protocol).extractor(spatial=False)
        assert isinstance(extractor, SmallClassifier)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--protocol", "best"], "takes one of pytorch-fid, adm, clean, dinov2-edm2, dinov2-dgm, got 'best'"),
        (
            ["--features", "dinov2", "--protocol", "adm"],
            "adm is not of dinov2, whose protocols are dinov2-edm2,",
        ),
        (["--metrics", "fdd"], "fdd is not of inception-v3-pytorch-fid, whose metrics are fid,is,kid,prc,mind"),
        (["--features", "dinov2", "--metrics", "fid"], "fid is not of dinov2-edm2, whose metrics are prc,mind,fdd,kdd"),
        (["--protocol", "dinov2-edm2", "--dinov2-weights", "none.pth"], "the DINOv2 weights none.pth do not exist"),
    ],
)
def test_what_does_not_fit_is_one_line(options, message, tmp_path, monkeypatch, capsys):
    sides = ["--samples", "digits:test", "--reference", "digits:train", *options]
    assert message in refused(monkeypatch, tmp_path, capsys, "generation", *sides)


def smooth(seed: int, shift: float) -> torch.Tensor:
    """Of 224x224, which no protocol resizes."""
    coarse = torch.rand(COUNT, 3, 5, 5, generator=torch.Generator().manual_seed(seed)) + shift
    pixels = torch.nn.functional.interpolate(coarse, (224, 224), mode="bicubic") * 255
    return pixels.round().clamp(0, 255).to(torch.uint8)


def test_distances_of_dinov2_are_those_of_torch_fidelity(tmp_path, monkeypatch):
    weights = random_weights(tmp_path / "dinov2.pth")
    for name, images in (("fake", smooth(1, 0.1)), ("real", smooth(2, 0.0))):
        (tmp_path / name).mkdir()
        save_pngs(tmp_path / name, [images])
    sides = ["--samples", "fake", "--reference", "real", "--protocol", "dinov2-edm2", "--dinov2-weights", weights]
    options = ["--kid-subset", SUBSET, "--allow-few", "--out", "report.json"]
    evaluate(monkeypatch, tmp_path, "generation", *sides, *options)
    report = json.loads((tmp_path / "report.json").read_text())
    monkeypatch.setattr("torch.hub.load", lambda repository, model: Original(weights))
    theirs = torch_fidelity.calculate_metrics(
        input1=str(tmp_path / "fake"),
        input2=str(tmp_path / "real"),
        fid=True,
        kid=True,
        prc=True,
        kid_subset_size=SUBSET,
        feature_extractor="dinov2-vit-l-14",
        cuda=False,
        cache=False,
        save_cpu_ram=True,  # without reader processes
        verbose=False,
    )
    assert set(report["values"]) == set(THEIRS)
    for name, key in THEIRS.items():
        assert report["values"][name] == pytest.approx(theirs[key], rel=1e-4, abs=1e-7), name
    assert report["values"]["fdd"] > 0.01
    assert f"fdd/fake-{COUNT}_vs_real-{COUNT}_dinov2-edm2-{WIDTH}x{DEPTH}" in report["metrics"]
    assert any(remark.startswith("DINOv2's weights: sha256 ") for remark in report["remarks"])
    assert not any("not Inception's" in remark for remark in report["remarks"])
    page = (tmp_path / "report.html").read_text()
    assert "FDD" in page
    assert "KDD" in page
    assert ">FID<" not in page
