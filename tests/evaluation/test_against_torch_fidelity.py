"""The whole way from files to numbers, with the real Inception network, against torch-fidelity and plain numpy."""

import json

import numpy as np
import pytest
import scipy.linalg
import torch
import torch_fidelity
from evaluations import evaluate
from inception_files import random_weights

from uvit_decay.image_io import save_pngs
from uvit_decay.metrics import Inception

COUNT, SUBSET = 10, 8
THEIRS = {
    "fid": "frechet_inception_distance",
    "is": "inception_score_mean",
    "is_std": "inception_score_std",
    "kid": "kernel_inception_distance_mean",
    "kid_std": "kernel_inception_distance_std",
    "precision": "precision",
    "recall": "recall",
}


def smooth(seed: int, shift: float) -> torch.Tensor:
    coarse = torch.rand(COUNT, 3, 5, 5, generator=torch.Generator().manual_seed(seed)) + shift
    pixels = torch.nn.functional.interpolate(coarse, (32, 32), mode="bicubic") * 255
    return pixels.round().clamp(0, 255).to(torch.uint8)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Weights, and two folders of images."""
    folder = tmp_path_factory.mktemp("inception")
    random_weights(folder / "inception.pth")
    for name, images in (("fake", smooth(1, 0.1)), ("real", smooth(2, 0.0))):
        (folder / name).mkdir()
        save_pngs(folder / name, [images])
    return folder


@pytest.mark.slow
def test_all_metrics_are_those_of_torch_fidelity_and_of_numpy(files, tmp_path, monkeypatch):
    evaluate(monkeypatch, tmp_path, "generation", "--samples", files / "fake", "--reference", files / "real",
             "--inception-weights", files / "inception.pth", "--protocol", "adm", "--kid-subset", SUBSET, "--allow-few",
             "--metrics", "fid,is,kid,prc,sfid", "--out", "report.json")  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())
    values = report["values"]
    theirs = torch_fidelity.calculate_metrics(
        input1=str(files / "fake"),
        input2=str(files / "real"),
        fid=True,
        isc=True,
        kid=True,
        prc=True,
        kid_subset_size=SUBSET,
        feature_extractor="inception-v3-compat",
        feature_layer_prc="2048",
        feature_extractor_weights_path=str(files / "inception.pth"),
        cuda=False,
        cache=False,
        verbose=False,
    )
    for name, key in THEIRS.items():
        assert values[name] == pytest.approx(theirs[key], rel=1e-4, abs=1e-7), name
    extractor = Inception(str(files / "inception.pth"), "adm")
    extractor.prepare(
        torch.zeros(0, 3, 32, 32, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), torch.device("cpu")
    )
    sides = [extractor(smooth(*side)).features.double().numpy() for side in ((1, 0.1), (2, 0.0))]
    assert values["fid"] == pytest.approx(independent_fid(*sides), rel=1e-6)
    assert values["sfid"] > 0
    remarks = " ".join(report["remarks"])
    for words in ("below 10,000", "has not full rank", "Inception weights are not the published ones"):
        assert words in remarks


def independent_fid(a: np.ndarray, b: np.ndarray) -> float:
    """pytorch-fid's formula, with scipy's matrix square root in the small space that the features span."""
    basis = np.linalg.qr(np.concatenate([a, b]).T)[0]  # distances and covariances live in it
    a, b = a @ basis, b @ basis
    covariances = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(covariances[0] @ covariances[1]).real
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(covariances[0] + covariances[1] - 2 * root))
