"""The whole way from files to numbers, with real networks of random weights, against torch-fidelity."""

import json

import dinov2_files
import inception_files
import pytest
import torch
import torch_fidelity
from dinov2_files import DEPTH, WIDTH
from evaluations import evaluate

from uvit_decay.pictures import save_pngs

COUNT, SUBSET = 10, 8
BOTH = {"precision": "precision", "recall": "recall"}
DISTANCES = ("frechet_inception_distance", "kernel_inception_distance_mean", "kernel_inception_distance_std")
OF_INCEPTION = dict(zip(("fid", "kid", "kid_std"), DISTANCES, strict=True)) | BOTH
OF_INCEPTION |= {"is": "inception_score_mean", "is_std": "inception_score_std"}
OF_DINOV2 = dict(zip(("fdd", "kdd", "kdd_std"), DISTANCES, strict=True)) | BOTH


def smooth(seed: int, shift: float, side: int) -> torch.Tensor:
    coarse = torch.rand(COUNT, 3, 5, 5, generator=torch.Generator().manual_seed(seed)) + shift
    pixels = torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic") * 255
    return pixels.round().clamp(0, 255).to(torch.uint8)


def compared(monkeypatch, folder, side, names, options, fid=True, **extractor):
    """Our report of two folders of images, whose values are torch-fidelity's."""
    for name, images in (("fake", smooth(1, 0.1, side)), ("real", smooth(2, 0.0, side))):
        (folder / name).mkdir()
        save_pngs(folder / name, [images])
    sides = ["--samples", "fake", "--reference", "real", "--kid-subset", SUBSET, "--allow-few", "--out", "report.json"]
    evaluate(monkeypatch, folder, "generation", *sides, *options)
    theirs = torch_fidelity.calculate_metrics(
        input1=str(folder / "fake"),
        input2=str(folder / "real"),
        fid=fid,
        kid=True,
        prc=True,
        kid_subset_size=SUBSET,
        cuda=False,
        cache=False,
        save_cpu_ram=True,  # without reader processes
        verbose=False,
        **extractor,
    )
    report = json.loads((folder / "report.json").read_text())
    for name, key in names.items():
        assert report["values"][name] == pytest.approx(theirs[key], rel=1e-4, abs=1e-7), name
    return report


@pytest.mark.slow
def test_metrics_of_inception_are_those_of_torch_fidelity(tmp_path, monkeypatch, exhaustive):
    """--exhaustive compares the FID, too, for which torch-fidelity takes the root of a matrix of 2,048 rows.

    The KID is of the same features, and the test below compares the distance of other features.
    """
    weights = inception_files.random_weights(tmp_path / "inception.pth")
    options = ["--inception-weights", weights, "--protocol", "adm", "--metrics", "fid,is,kid,prc,sfid"]
    theirs = {"feature_extractor": "inception-v3-compat", "feature_extractor_weights_path": str(weights)}
    theirs |= {"isc": True, "feature_layer_prc": "2048"}
    names = {name: key for name, key in OF_INCEPTION.items() if exhaustive or name != "fid"}
    report = compared(monkeypatch, tmp_path, 32, names, options, fid=exhaustive, **theirs)
    assert report["values"]["fid"] > 0
    assert report["values"]["sfid"] > 0
    remarks = " ".join(report["remarks"])
    for words in ("below 10,000", "rank", "Inception"):
        assert words in remarks


def test_metrics_of_dinov2_are_those_of_torch_fidelity_under_names_of_their_own(tmp_path, monkeypatch):
    """Of images of 224x224, which no protocol resizes."""
    weights = dinov2_files.random_weights(tmp_path / "dinov2.pth")
    monkeypatch.setattr("torch.hub.load", lambda repository, model: dinov2_files.Original(weights))
    options = ["--protocol", "dinov2-edm2", "--dinov2-weights", weights]
    report = compared(monkeypatch, tmp_path, 224, OF_DINOV2, options, feature_extractor="dinov2-vit-l-14")
    assert set(report["values"]) == set(OF_DINOV2)
    assert report["values"]["fdd"] > 0.01
    assert f"fdd/fake-{COUNT}_vs_real-{COUNT}_dinov2-edm2-{WIDTH}x{DEPTH}" in report["metrics"]
    assert any(remark.startswith("DINOv2's weights: sha256 ") for remark in report["remarks"])
    assert not any("not Inception's" in remark for remark in report["remarks"])
    page = (tmp_path / "report.html").read_text()
    assert "FDD" in page
    assert "KDD" in page
    assert ">FID<" not in page
