"""The whole evaluation, FID, IS, KID, precision and recall, from PNGs, beside torch-fidelity's with the same weights.

The weights are random ones in the layout of the published file: the work is the same.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch_fidelity
from torch_fidelity import feature_extractor_inceptionv3 as inception

from benchmarks.cases import Agreement, Case, Compared, Setting
from benchmarks.measuring import model_flops
from uvit_decay.encoders import Inception
from uvit_decay.evaluation.comparison import Comparison
from uvit_decay.evaluation.metric_table import MetricOptions
from uvit_decay.evaluation.open_by_name import open_images
from uvit_decay.pictures import save_pngs
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.precision import Precision

METRICS = {"fid": "frechet_inception_distance", "is": "inception_score_mean", "kid": "kernel_inception_distance_mean"}
METRICS |= {"precision": "precision", "recall": "recall"}
TOLERANCES = {"float32": 1e-2, "tf32": 2e-2, "bf16": 0.1}  # of the FID, relative; of few images it is badly conditioned
RATES = {"float32": "float32", "tf32": "float32", "bf16": "bf16"}
BATCH = 64


def cases(setting: Setting) -> Iterator[Case]:
    """Yield one case, in the precisions that the extractor offers; torch-fidelity computes in float32."""
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # torch-fidelity's
    count = setting.size(32, 5000, 12)
    subset = min(1000, count // 2)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        weights = random_weights(root / "inception.pth")
        sides = [write_images(root / str(seed), seed, count, 32) for seed in (1, 2)]
        precisions = ("float32", "tf32", "bf16") if setting.on_gpu else ("float32", "bf16")
        runs = {p: partial(ours, *sides, weights, BATCH, subset, setting.device, p) for p in precisions}
        runs["plain"] = partial(theirs, *sides, weights, BATCH, subset, setting.on_gpu)
        wanted = runs["plain"]()[METRICS["fid"]]
        compared = [
            Compared(p, p, "plain", Agreement(abs(runs[p]()["fid"] / wanted - 1), TOLERANCES[p]), rate=RATES[p])
            for p in precisions
        ]
        flops = 2 * count * image_flops(weights)
        yield Case("FID, IS, KID, PRC of 32x32 PNGs", 2 * count, runs, compared, 5, flops)


def image_flops(weights: Path) -> int:
    """Return the FLOPs of the features of one image."""
    extractor = Inception(str(weights), "adm")
    extractor.prepare(torch.zeros(0, 3, 1, 1), torch.zeros(0), torch.device("cpu"))
    return model_flops(lambda: extractor(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)))


def random_weights(path: Path) -> Path:
    """Write a file like the published one, with weights that keep activations in range."""
    torch.manual_seed(0)
    with (
        patch.object(inception, "load_state_dict_from_url", return_value={}),
        patch.object(inception.FeatureExtractorInceptionV3, "load_state_dict"),
    ):
        net = inception.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
    for name, value in net.state_dict().items():
        if value.ndim == 4:
            torch.nn.init.kaiming_normal_(value)
        elif name == "fc.weight":
            torch.nn.init.normal_(value, std=2048**-0.5)
    torch.save(net.state_dict(), path)
    return path


def write_images(folder: Path, seed: int, count: int, size: int) -> Path:
    """Write smooth noise: unlike white noise its features differ from image to image."""
    random = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 6, 6, generator=random)
    images = torch.nn.functional.interpolate(coarse, (size, size), mode="bicubic").clamp(0, 1).mul(255).to(torch.uint8)
    folder.mkdir()
    save_pngs(folder, [images])
    return folder


def ours(
    samples: Path, reference: Path, weights: Path, batch: int, subset: int, device: torch.device, precision: Precision
) -> dict[str, float]:
    """Return the metrics, with nothing cached."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        extractor = Inception(str(weights), "adm", precision=precision)
        extractor.prepare(torch.zeros(0, 3, 1, 1), torch.zeros(0), device)
        sides = open_images(str(samples), 3), None, open_images(str(reference), 3)
        options = MetricOptions(("fid", "is", "kid", "prc"), subset, allow_few=True)
        comparison = Comparison(*sides, extractor, device, batch, options)
        store, against = comparison.extract(Path(folder) / "samples", Processes())
        return comparison.measure(store, against)


def theirs(samples: Path, reference: Path, weights: Path, batch: int, subset: int, cuda: bool) -> dict[str, float]:
    """Return torch-fidelity's metrics, with nothing cached."""
    return torch_fidelity.calculate_metrics(
        input1=str(samples),
        input2=str(reference),
        fid=True,
        isc=True,
        kid=True,
        prc=True,
        kid_subset_size=subset,
        feature_extractor="inception-v3-compat",
        feature_layer_prc="2048",
        feature_extractor_weights_path=str(weights),
        batch_size=batch,
        cuda=cuda,
        cache=False,
        verbose=False,
    )
