"""`evaluate.py generation` and `statistics`; what they compute with is imported after --help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from uvit_decay.encoders.table import DIGITS, FeatureOptions
from uvit_decay.evaluation.metric_table import MetricOptions
from uvit_decay.files.instantiate import Trusted
from uvit_decay.generation.options import Count, SamplingOptions
from uvit_decay.terminal.errors import UserError

if TYPE_CHECKING:
    import torch

    from uvit_decay.encoders.extractors import Extractor
    from uvit_decay.evaluation.image_sources import ImageSource
    from uvit_decay.runtime.distributed import Processes

GREY = 1  # channels of the digits
RGB = 3


def _prepare(
    extractor: Extractor,
    features: FeatureOptions,
    shape: tuple[int, ...],
    device: torch.device,
    processes: Processes,
    name: str,
    reference: ImageSource | None,
) -> None:
    """Prepare the extractor; one that is trained is trained on the labelled reference, as in training.

    Args:
        extractor: the extractor.
        features: its options.
        shape: shape of the images, (c, h, w).
        device: its device.
        processes: the processes of this program.
        name: name of the reference.
        reference: images of the reference; None for statistics.
    """
    from uvit_decay.data import Digits
    from uvit_decay.evaluation.comparison import MOST_REFERENCE
    from uvit_decay.evaluation.extractor_cache import prepare_extractor
    from uvit_decay.evaluation.image_sources import DatasetImages, choose_reference

    training = None
    if features.name == DIGITS:
        digits = Digits()
        digits.setup()
        training = DatasetImages(f"{digits.name}-train", digits.train, GREY, digits.class_names)
    elif extractor.needs_labels:
        if reference is None or reference.labels is None or len(reference.class_names) < 2:
            raise UserError(
                f"--features {features.name} is trained on the reference, and {name} has no images of two classes or "
                "more; give a data set such as cifar10:train, or class folders"
            )
        training = choose_reference(reference, MOST_REFERENCE)
    prepare_extractor(extractor, shape, device, processes, training)
    if features.name == DIGITS:
        extractor.class_names = None  # labels of other images are not compared


def _choose_channels(features: FeatureOptions, extractor: Extractor, name: str, samples: int | None = None) -> int:
    """Return the number of channels in which images are read.

    Args:
        features: the extractor's options.
        extractor: the extractor.
        name: name of the reference, whose channels are chosen if the extractor is trained on it.
        samples: channels of the samples of a checkpoint.
    """
    from uvit_decay.evaluation.open_by_name import count_channels

    if extractor.channels is not None:
        return extractor.channels
    if features.name == DIGITS:
        return GREY
    return samples or count_channels(name) or RGB


def check_ending(option: str, path: Path | None, ending: str) -> None:
    """Raise a UserError if a path is given and its name does not end in `ending`, such as ".json"."""
    if path is not None and path.suffix.lower() != ending:
        raise UserError(f"{option} {path}: the name must end in {ending}")


def _check_samples(
    samples: str | None, ckpt: Path | None, num: int | None, save_samples: Path | None, sampling: SamplingOptions
) -> None:
    """Raise a UserError unless there are either images (--samples), without sampling options, or a checkpoint."""
    if (samples is None) == (ckpt is None):
        raise UserError("generation takes either --samples, images that exist, or --ckpt, whose samples are made now")
    if samples is None:
        return
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
    max_reference: Count | None = None,
    save_samples: Path | None = None,
    ceiling: str | None = None,
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
        max_reference: largest number of reference images, a fixed random choice as in training; default: all.
        save_samples: keep the samples of --ckpt, too, as an .npz.
        ceiling: real images, such as the test set, whose values stand beside the samples'; default: the test images of
            --reference SET:train if --features are small-cnn or a network, otherwise none.
    """
    check_ending("--out", out, ".json")
    check_ending("--save-samples", save_samples, ".npz")
    _check_samples(samples, ckpt, num, save_samples, sampling)

    from uvit_decay.commands.opening import open_program, tell_what_was_read
    from uvit_decay.evaluation.comparison import Comparison, open_reference
    from uvit_decay.evaluation.image_sources import GeneratedImages, choose_reference
    from uvit_decay.evaluation.open_by_name import open_images, open_test_images
    from uvit_decay.evaluation.report import write_reports
    from uvit_decay.generation.samples import Samples

    files = list(features.files)
    if ckpt is not None:
        files += sampling.files(ckpt)
    with open_program(files, sampling.device) as (processes, device):
        extractor = features.extractor(metrics.spatial, sampling.trust)
        metrics.check_names(extractor)
        if ckpt is None:
            channels = _choose_channels(features, extractor, reference)
            images = open_images(samples, channels, features.image_size, features.on_white)
        else:
            sampled = replace(Samples.from_options(ckpt, sampling, processes.local_rank), compiled=features.compile)
            channels = _choose_channels(features, extractor, reference, sampled.shape[0])
            images = GeneratedImages(sampled, num or 50_000, channels)
        file, reference_images = open_reference(reference, images.shape[0], features.image_size, features.on_white)
        tell_what_was_read([images, reference_images], processes)
        if max_reference is not None:
            if file is not None:
                raise UserError(f"--max-reference is for reference images, {file.path} has statistics: leave it out")
            reference_images = choose_reference(reference_images, max_reference)
        _prepare(extractor, features, images.shape, device, processes, reference, reference_images)
        comparison = Comparison(images, file, reference_images, extractor, device, sampling.batch_size, metrics)
        comparison.check()
        channels = images.shape[0]
        real_images = None
        if ceiling is not None:
            real_images = open_images(ceiling, channels, features.image_size, features.on_white)
        elif features.has_ceiling:
            real_images = open_test_images(reference, channels)
            if real_images is not None and not comparison.can_compare(real_images):
                real_images = None
        real = None if real_images is None else comparison.compare_real(real_images)
        write_reports(comparison, out or Path(comparison.default_name()), save_samples, processes, real)


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

    from uvit_decay.commands.opening import claim_outputs, open_program, tell_what_was_read
    from uvit_decay.evaluation.extract import Extraction
    from uvit_decay.evaluation.open_by_name import open_images
    from uvit_decay.evaluation.statistics_file import save_statistics

    with open_program(features.files, device) as (processes, chosen_device), claim_outputs(out, processes=processes):
        extractor = features.extractor(spatial, trust)
        if spatial and "spatial" not in extractor.widths:
            raise UserError(f"--spatial features are Inception's, {extractor.name} yields none")
        channels = _choose_channels(features, extractor, reference)
        images = open_images(reference, channels, features.image_size, features.on_white)
        tell_what_was_read([images], processes)
        _prepare(extractor, features, images.shape, chosen_device, processes, reference, images)
        keep = ["features"]
        if spatial:
            keep.append("spatial")
        store = Extraction(extractor, chosen_device, batch_size).run(images, keep, processes)
        if processes.is_main:
            about = {"extractor": extractor.fingerprint(), **extractor.describe(), **images.metadata()}
            save_statistics(out, {kind: store.statistics(kind) for kind in keep}, about)
            print(f"wrote {out}: {len(images):,} images of {images.name}, {extractor.fingerprint()}")
