"""Judge generated images: python evaluate.py generation --samples X --reference Y [--metrics fid,is,kid,prc,sfid] ...

X is a folder, zip or tar of images, or an .npz; with --ckpt and --num the samples of a checkpoint are judged as they
are made. Y is one of these too, a data set such as cifar100:train, one of a configuration (configs/digits.yaml:train),
or an .npz of statistics, which `python evaluate.py statistics Y --out stats.npz` writes. On several GPUs:
torchrun --nproc_per_node 8 -- evaluate.py ...
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from uvit_decay.evaluation.metric_table import METRICS
from uvit_decay.representations import visualize as feature_images
from uvit_decay.runtime.errors import UserError, user_errors
from uvit_decay.sampling_options import add_precision_option, add_sampling_options, check_numbers

if TYPE_CHECKING:
    import torch

    from uvit_decay.evaluation.generation import Comparison
    from uvit_decay.evaluation.image_sources import ImageSource
    from uvit_decay.metrics.extractors import Extractor
    from uvit_decay.runtime.distributed import Processes

GREY = 1  # channels of the digits


def parse(args: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    generation = commands.add_parser("generation", help="FID, IS, KID, precision and recall, sFID, and a report")
    judged = generation.add_argument_group("what is judged").add_mutually_exclusive_group(required=True)
    judged.add_argument("--samples", help="folder, zip, tar, .npz or data set of images")
    judged.add_argument("--ckpt", type=Path, help="a .ckpt or .safetensors: its samples, made now")
    generation.add_argument("--reference", required=True, help="images or statistics to compare with")
    generation.add_argument(
        "--metrics", help=f"some of {','.join(METRICS)}; default: all but sfid that the reference allows"
    )
    generation.add_argument("--kid-subset", type=int, default=1000, help="images in each subset; default: 1000")
    generation.add_argument("--allow-few", action="store_true", help="allow FID of fewer images than features")
    generation.add_argument("--out", type=Path, help="report.json, with report.html beside it; default: a telling name")
    sampling = generation.add_argument_group("how a checkpoint samples")
    sampling.add_argument("-n", "--num", type=int, help="samples; default: 50,000")
    sampling.add_argument("--save-samples", type=Path, help="keep the samples, too, as an .npz")
    add_sampling_options(sampling)
    statistics = commands.add_parser("statistics", help="mean and covariance of the features of a reference")
    statistics.add_argument("reference", help="folder, zip, tar, .npz, data set or configuration")
    statistics.add_argument("--out", type=Path, required=True, help="stats.npz")
    statistics.add_argument("--spatial", action="store_true", help="with those of sFID")
    statistics.add_argument("--batch-size", type=int, default=64, help="images at a time; default: 64")
    statistics.add_argument("--device", help="cpu, cuda, cuda:1; default: the GPU if there is one")
    probe = commands.add_parser("probe", help="linear probes, nearest neighbours, rank: every layer and noise level")
    probe.add_argument("--ckpt", type=Path, required=True, help="a .ckpt or .safetensors")
    probe.add_argument("--data", help="digits, cifar10, cifar100, a configuration, or class folders; default: its own")
    probe.add_argument("--test", help="test images beside class folders; default: a tenth is held out")
    probe.add_argument("--layers", default="all", help="comma-separated numbers or names; default: all")
    probe.add_argument("--times", help="comma-separated noise levels in (0, 1); default: 0.01 to 0.5, eight of them")
    probe.add_argument("--pool", choices=("mean", "all"), default="mean", help="mean of patch tokens, or of all tokens")
    probe.add_argument("--max-train", type=int, default=50_000, help="training images at most; default: 50,000")
    probe.add_argument("--max-test", type=int, default=10_000, help="test images at most; default: 10,000")
    probe.add_argument("--seed", type=int, default=0, help="of the noise; default: 0")
    probe.add_argument("--batch-size", type=int, default=256, help="images at a time; default: 256")
    probe.add_argument("--weights", choices=("ema", "raw"), help="default: EMA where the checkpoint has them")
    probe.add_argument("--device", help="cpu, cuda, cuda:1; default: the GPU if there is one")
    add_precision_option(probe)
    probe.add_argument("--trust", action="append", default=[], metavar="CLASS", help="network class to allow")
    probe.add_argument(
        "--knn-uniform", action="store_true", help="one vote for each neighbour, instead of DINO's weights"
    )
    probe.add_argument(
        "--out", type=Path, help="folder for probes.csv, .json, .png; default: in probes/, a telling name"
    )
    feature_images.add_options(commands.add_parser("features", help="patch features as colours, clusters, t-SNE"))
    for command in (generation, statistics):
        _add_feature_options(command.add_argument_group("features"))
    return parser.parse_args(args)


def _add_feature_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--features", default="inception", help="inception (default), digits, or a TorchScript or .pt2 file"
    )
    group.add_argument(
        "--protocol",
        choices=("pytorch-fid", "adm", "clean"),
        default="pytorch-fid",
        help="how Inception's images are resized: pytorch-fid as U-ViT, adm as SiT; default: pytorch-fid",
    )
    group.add_argument(
        "--inception-weights", help="the file that torch-fidelity uses; default: torch's cache, or download"
    )
    group.add_argument("--image-size", type=int, help="crop images of files to this size, as ADM does")
    group.add_argument("--compile", action="store_true", help="torch.compile for Inception")


def extractor_for(options: argparse.Namespace, spatial: bool) -> "Extractor":
    """Return the chosen feature extractor, not yet loaded."""
    from uvit_decay.metrics.extractors import ExtractorOptions, create_extractor

    given = ExtractorOptions(options.inception_weights, options.protocol, spatial, options.compile)
    return create_extractor(options.features, given)


def prepare(extractor: "Extractor", images: "ImageSource", device: "torch.device") -> None:
    """Load the extractor for images of this shape, or train the digit classifier."""
    from uvit_decay.data import Digits
    from uvit_decay.metrics.extractors import load

    if extractor.needs_labels:
        digits = Digits()
        digits.setup()
        extractor.prepare(*digits.train[list(range(len(digits.train)))], device)
    else:
        load(extractor, images.shape, device)


def _refuse_sampling(options: argparse.Namespace) -> None:
    """Raise a UserError for sampling options, which do not apply to existing images (--samples)."""
    names = ("num", "save_samples", "classes", "guidance", "guidance_interval", "guidance_channels", "sampler", "steps")
    names += ("labels", "clip", "seed", "precision", "weights", "vae", "trust")
    given = [name for name in names if getattr(options, name) or getattr(options, name) is False]
    if given:
        raise UserError(f"--{given[0].replace('_', '-')} is for the samples of a --ckpt, --samples are there already")


def samples_for(options: argparse.Namespace, channels: int, processes: "Processes") -> "ImageSource":
    """Return the images to evaluate: those of --samples, or samples of --ckpt."""
    from uvit_decay.evaluation.generated import CheckpointImages
    from uvit_decay.evaluation.open_by_name import open_images
    from uvit_decay.samples import Samples

    if options.ckpt is None:
        _refuse_sampling(options)
        return open_images(options.samples, channels, options.image_size)
    sampled = Samples.from_options(options.ckpt, options, processes.local_rank)
    return CheckpointImages(options.ckpt, sampled, options.num or 50_000, channels)


def generation(options: argparse.Namespace, processes: "Processes") -> None:
    """Compare images with a reference: FID and other metrics, report.json and report.html."""
    from uvit_decay.evaluation.generation import Comparison
    from uvit_decay.evaluation.metric_table import MetricOptions, chosen_metrics
    from uvit_decay.evaluation.open_by_name import open_reference
    from uvit_decay.runtime.files import check_writable, claimed
    from uvit_decay.samples import pick_device

    device = pick_device(options.device, processes.local_rank)
    names = None if options.metrics is None else tuple(name.strip() for name in options.metrics.split(","))
    metric_options = MetricOptions(names, options.kid_subset, options.allow_few)
    extractor = extractor_for(options, metric_options.spatial)
    channels = extractor.channels or GREY
    samples = samples_for(options, channels, processes)
    file, reference = open_reference(options.reference, channels, options.image_size)
    prepare(extractor, samples, device)
    fewest = 0 if reference is None else min(len(samples), len(reference))
    metrics = chosen_metrics(metric_options, extractor, fewest)
    comparison = Comparison(samples, file, reference, extractor, metrics, device, options.batch_size, metric_options)
    comparison.check()
    out = options.out or Path(comparison.default_name())
    check_writable(out)
    if options.save_samples is not None:
        check_writable(options.save_samples)
    with claimed(out, processes.is_main):
        judge(options, comparison, out, processes)


def judge(options: argparse.Namespace, comparison: "Comparison", out: Path, processes: "Processes") -> None:
    """Compute the metrics, and write the reports on rank 0."""
    from uvit_decay.evaluation.report import compared, save_json, write_html
    from uvit_decay.image_io import save_npz

    store, against = comparison.extract(out.with_suffix(".features"), processes, options.save_samples is not None)
    if not processes.is_main:
        return
    report = compared(comparison, store, against)
    save_json(out, report)
    write_html(out.with_suffix(".html"), report)
    if options.save_samples is not None:
        save_npz(options.save_samples, store.iterate("images"), len(store), comparison.samples.labels)
    store.remove()
    for name, value in report.metrics.items():
        print(f"{name} {value:.6g}")
    for remark in report.remarks:
        print(f"remark: {remark}", file=sys.stderr)
    print(f"wrote {out} and {out.with_suffix('.html').name}")


def statistics(options: argparse.Namespace, processes: "Processes") -> None:
    """Write an .npz of reference statistics with its metadata."""
    from uvit_decay.evaluation.extract import Extraction
    from uvit_decay.evaluation.open_by_name import open_images
    from uvit_decay.evaluation.statistics import save_statistics
    from uvit_decay.runtime.files import check_writable
    from uvit_decay.samples import pick_device

    check_writable(options.out)
    device = pick_device(options.device, processes.local_rank)
    extractor = extractor_for(options, options.spatial)
    if options.spatial and "spatial" not in extractor.widths:
        raise UserError(f"--spatial features are Inception's, {extractor.name} yields none")
    images = open_images(options.reference, extractor.channels or GREY, options.image_size)
    prepare(extractor, images, device)
    keep = ["features", *(["spatial"] if options.spatial else [])]
    store = Extraction(extractor, device, options.batch_size).run(images, keep, processes)
    if processes.is_main:
        about = {"extractor": extractor.fingerprint(), **images.metadata()}
        save_statistics(options.out, {kind: store.statistics(kind) for kind in keep}, about)
        print(f"wrote {options.out}: {len(images):,} images of {images.name}, {extractor.fingerprint()}")


def probe(options: argparse.Namespace, processes: "Processes") -> None:
    """Probe a checkpoint, and write probes.csv, probes.json and probes.png."""
    from uvit_decay import checkpoint
    from uvit_decay.evaluation.open_by_name import SETS, open_data
    from uvit_decay.representations.probing import TIMES, Prober, Probing, check_probed
    from uvit_decay.runtime.files import check_writable, claimed
    from uvit_decay.runtime.precision import chosen_precision
    from uvit_decay.samples import pick_device

    try:
        times = TIMES if options.times is None else tuple(map(float, options.times.split(",")))
    except ValueError as error:
        raise UserError(f"--times takes numbers such as 0.05,0.1, got {options.times!r}") from error
    layers = None if options.layers == "all" else tuple(options.layers.split(","))
    sizes = {name: getattr(options, name) for name in ("max_train", "max_test", "seed", "batch_size", "pool")}
    probing = Probing(times, layers, uniform=options.knn_uniform, **sizes)
    found = checkpoint.load(options.ckpt, options.weights, options.trust)
    if options.data is None and found.data not in SETS:
        raise UserError(f"{options.ckpt} was trained on {found.data}: name it, or other data, with --data")
    data = open_data(options.data or found.data, options.test, found.net.image_size, found.net.channels)
    check_probed(found.net, data, probing)
    device = pick_device(options.device, processes.local_rank)
    precision = chosen_precision(options.precision, device)
    name = f"{options.ckpt.stem}-step{found.step}-{found.weights}-{data.name}"
    out = options.out or Path("probes") / (name if precision == "float32" else f"{name}-{precision}")
    check_writable(out, folder=True)
    about = {"checkpoint": str(options.ckpt), "step": found.step, "weights": found.weights}
    with claimed(out, processes.is_main):
        grid = Prober(found.net.to(device), found.path, data, probing, device, precision).grid(processes, show=True)
        if grid is not None:
            grid.save(out, f"Linear probe of {options.ckpt.name}, test accuracy in %", about)
    if grid is not None:
        best = grid.summary()
        print(f"best cell: {best['name']} at t = {best['t']:g}: test accuracy {best['test_accuracy']:.4f}")
        print(f"best on test, as papers report it: {best['best_on_test_accuracy_of_all_cells']:.4f}")
        print(f"wrote probes.csv, probes.json and probes.png in {out}")


def check(options: argparse.Namespace) -> None:
    """Raise a UserError for options that cannot be right, before any file is read."""
    check_numbers(options)
    endings = {"generation": {"out": ".json", "save_samples": ".npz"}, "statistics": {"out": ".npz"}}
    for name, ending in endings.get(options.command, {}).items():
        path = getattr(options, name)
        if path is not None and path.suffix.lower() != ending:
            raise UserError(f"--{name.replace('_', '-')} {path}: the name must end in {ending}")


def main(args: Sequence[str]) -> None:
    """Run the command line."""
    options = parse(args)
    check(options)
    from uvit_decay.runtime.distributed import Processes

    processes = Processes.launched()
    commands = {"generation": generation, "statistics": statistics, "probe": probe, "features": feature_images.run}
    try:
        commands[options.command](options, processes)
    finally:
        processes.end()


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
