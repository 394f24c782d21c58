"""The whole evaluation, FID, IS, KID, precision and recall, against torch-fidelity's on the same images and weights.

python benchmarks/evaluation_speed.py [--weights FILE] [--images 128] [--size 32] [--threads 2] [--repeats 3]

Random images as PNGs; without --weights random ones in the file's layout: the work is the same. Each repeat runs
both, one after the other, with nothing cached; medians are of the repeats.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch_fidelity

from uvit_decay.evaluation.generation import Comparison
from uvit_decay.evaluation.metric_table import MetricOptions
from uvit_decay.evaluation.open_by_name import open_images
from uvit_decay.image_io import save_pngs
from uvit_decay.metrics import Inception
from uvit_decay.runtime.distributed import Processes

METRICS = {"fid": "frechet_inception_distance", "is": "inception_score_mean", "kid": "kernel_inception_distance_mean"}
METRICS |= {"precision": "precision", "recall": "recall"}


def random_weights(path: Path) -> Path:
    """A file like the published one, with weights that keep activations in range."""
    from unittest.mock import patch

    from torch_fidelity import feature_extractor_inceptionv3 as inception

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
    """Smooth noise: unlike white noise its features differ from image to image."""
    random = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 6, 6, generator=random)
    images = torch.nn.functional.interpolate(coarse, (size, size), mode="bicubic").clamp(0, 1).mul(255).to(torch.uint8)
    folder.mkdir()
    save_pngs(folder, [images])
    return folder


def ours(
    samples: Path, reference: Path, weights: Path, batch: int, subset: int, device: torch.device
) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        extractor = Inception(str(weights), "adm")
        extractor.prepare(torch.zeros(0, 3, 1, 1), torch.zeros(0), device)
        sides = open_images(str(samples), 3), None, open_images(str(reference), 3)
        options = MetricOptions(("fid", "is", "kid", "prc"), subset, allow_few=True)
        comparison = Comparison(*sides, extractor, device, batch, options)
        store, against = comparison.extract(Path(folder) / "samples", Processes(), show=False)
        return comparison.measure(store, against)


def theirs(samples: Path, reference: Path, weights: Path, batch: int, subset: int, cuda: bool) -> dict[str, float]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--images", type=int, default=128, help="on each side")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        weights = options.weights or random_weights(root / "inception.pth")
        sides = [write_images(root / str(seed), seed, options.images, options.size) for seed in (1, 2)]
        subset = min(1000, options.images // 2)
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(options.repeats):
            start = time.perf_counter()
            mine = ours(*sides, weights, options.batch, subset, device)
            middle = time.perf_counter()
            other = theirs(*sides, weights, options.batch, subset, device.type == "cuda")
            times["ours"].append(middle - start)
            times["theirs"].append(time.perf_counter() - middle)
        for name, key in METRICS.items():
            print(f"{name:10} {mine[name]:.8g}, torch-fidelity {other[key]:.8g}")
        total = 2 * options.images
        rates = {name: total / statistics.median(seconds) for name, seconds in times.items()}
        ratios = sorted(b / a for a, b in zip(times["ours"], times["theirs"], strict=True))
        print(
            f"{rates['ours']:.2f} images/s, torch-fidelity {rates['theirs']:.2f}: {statistics.median(ratios):.2f} times"
        )
        print(f"ratios of the repeats {ratios[0]:.2f} to {ratios[-1]:.2f}; {device}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
