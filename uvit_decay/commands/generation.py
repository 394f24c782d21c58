"""`evaluate.py generation` and `statistics`; what they compute with is imported after --help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from uvit_decay.evaluation.feature_table import FeatureOptions
from uvit_decay.evaluation.metric_table import MetricOptions
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.instantiate import Trusted
from uvit_decay.sampling_options import Count, SamplingOptions

if TYPE_CHECKING:
    from torch import Tensor

GREY = 1  # channels of the digits


def _load_digits() -> tuple[Tensor, Tensor]:
    """Return images and labels of the training digits, for extractors that need labels."""
    from uvit_decay.data import Digits

    digits = Digits()
    digits.setup()
    return digits.train[list(range(len(digits.train)))]


def check_ending(option: str, path: Path | None, ending: str) -> None:
    """Raise a UserError if a path is given and its name does not end in `ending`, such as ".json"."""
    if path is not None and path.suffix.lower() != ending:
        raise UserError(f"{option} {path}: the name must end in {ending}")


def _refuse_sampling(num: int | None, save_samples: Path | None, sampling: SamplingOptions) -> None:
    """Raise a UserError for sampling options, which do not apply to existing images (--samples)."""
    plain = SamplingOptions(device=sampling.device, batch_size=sampling.batch_size, trust=sampling.trust)
    given = []
    if num:
        given.append("num")
    if save_samples:
        given.append("save_samples")
    for name, value in asdict(plain).items():
        if value != getattr(sampling, name):
            given.append(name)
    if given:
        flag = f"--{given[0].replace('_', '-')}"
        raise UserError(f"{flag} is for the samples of a --ckpt, --samples are there already")


def generation(
    *,
    samples: str | None = None,
    ckpt: Path | None = None,
    reference: str,
    out: Path | None = None,
    num: Annotated[Count | None, "-n"] = None,
    save_samples: Path | None = None,
    metrics: MetricOptions,
    features: FeatureOptions,
    sampling: SamplingOptions,
) -> None:
    """FID, IS, KID, precision and recall, sFID, and a report.

    Args:
        samples: folder, zip, tar, .npz or data set of images.
        ckpt: a .ckpt, .safetensors or exported folder, instead of --samples: it is sampled now.
        reference: images or statistics to compare with.
        out: report.json, with report.html beside it; default: a telling name.
        num: samples of --ckpt; default: 50,000.
        save_samples: keep the samples of --ckpt, too, as an .npz.
    """
    check_ending("--out", out, ".json")
    check_ending("--save-samples", save_samples, ".npz")
    if (samples is None) == (ckpt is None):
        raise UserError("generation takes either --samples, images that exist, or --ckpt, whose samples are made now")
    if samples is not None:
        _refuse_sampling(num, save_samples, sampling)

    from uvit_decay.commands.opening import open_program
    from uvit_decay.evaluation.generation import Comparison, open_reference
    from uvit_decay.evaluation.image_sources import GeneratedImages
    from uvit_decay.evaluation.open_by_name import open_images
    from uvit_decay.evaluation.report import write_reports
    from uvit_decay.metrics.extractors import prepare
    from uvit_decay.samples import Samples

    files = [] if ckpt is None else sampling.files(ckpt)
    with open_program(files, sampling.device) as (processes, device):
        extractor = features.extractor(metrics.spatial)
        metrics.check_names(extractor)
        channels = extractor.channels or GREY
        if ckpt is None:
            images = open_images(samples, channels, features.image_size)
        else:
            samples_of_ckpt = Samples.from_options(ckpt, sampling, processes.local_rank)
            samples_of_ckpt = replace(samples_of_ckpt, compiled=features.compile)
            images = GeneratedImages(samples_of_ckpt, num or 50_000, channels)
        file, reference_images = open_reference(reference, channels, features.image_size)
        prepare(extractor, images.shape, device, _load_digits)
        comparison = Comparison(images, file, reference_images, extractor, device, sampling.batch_size, metrics)
        comparison.check()
        write_reports(comparison, out or Path(comparison.default_name()), save_samples, processes)


def statistics(
    reference: str,
    *,
    out: Path,
    spatial: bool = False,
    batch_size: Count = 64,
    device: str | None = None,
    trust: Sequence[Trusted] = (),
    features: FeatureOptions,
) -> None:
    """Mean and covariance of the features of a reference, as an .npz with its metadata.

    Args:
        reference: folder, zip, tar, .npz, data set or configuration.
        out: stats.npz.
        spatial: with the statistics of sFID.
        batch_size: images at a time.
        device: cpu, cuda, cuda:1; default: the GPU if there is one.
        trust: module to import, which may register an extractor or a data set; may be given again.
    """
    check_ending("--out", out, ".npz")

    from uvit_decay.commands.opening import claim_outputs, open_program
    from uvit_decay.evaluation.extract import Extraction
    from uvit_decay.evaluation.open_by_name import open_images
    from uvit_decay.evaluation.statistics_file import save_statistics
    from uvit_decay.metrics.extractors import prepare

    with open_program(device=device) as (processes, chosen_device), claim_outputs(out, processes=processes):
        extractor = features.extractor(spatial)
        if spatial and "spatial" not in extractor.widths:
            raise UserError(f"--spatial features are Inception's, {extractor.name} yields none")
        images = open_images(reference, extractor.channels or GREY, features.image_size)
        prepare(extractor, images.shape, chosen_device, _load_digits)
        keep = ["features"]
        if spatial:
            keep.append("spatial")
        store = Extraction(extractor, chosen_device, batch_size).run(images, keep, processes)
        if processes.is_main:
            about = {"extractor": extractor.fingerprint(), **images.metadata()}
            save_statistics(out, {kind: store.statistics(kind) for kind in keep}, about)
            print(f"wrote {out}: {len(images):,} images of {images.name}, {extractor.fingerprint()}")
