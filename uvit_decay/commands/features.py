"""`evaluate.py probe`, `classify` and `reconstruct`: features of a network, of images opened by name.

Each command imports its libraries when it runs, so that help is quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uvit_decay.commands.generation import check_ending
from uvit_decay.generation.options import LoadingOptions, PrecisionOption
from uvit_decay.representations.probe_options import NOISE_ALONE, Alignment, Classification, Probing, Reconstruction
from uvit_decay.terminal.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from uvit_decay.data.datamodule import ImageData
    from uvit_decay.encoders.networks import ProbedNetwork
    from uvit_decay.representations.grid import Grid
    from uvit_decay.representations.noise import NoiseTable
    from uvit_decay.runtime.precision import Precision


@dataclass(frozen=True, kw_only=True)
class ProbedOptions:
    """Network and data.

    Args:
        ckpt: a .ckpt, .safetensors or exported folder, timm's timm:NAME or timm:NAME=FILE, or raw pixels,
            pixels:32x32x3.
        data: digits, cifar10, cifar100, a configuration, or class folders; default: its own.
        test: test images beside class folders; default: a tenth is held out.
        precision: of the network; part of names and reports unless float32; default: tf32 on CUDA GPUs,
            float32 elsewhere.
    """

    ckpt: Path
    data: str | None = None
    test: str | None = None
    precision: PrecisionOption | None = None

    def name_result(self, network: ProbedNetwork, data: ImageData, settings: str) -> str:
        """Return the default name of a result, with a hash of files and images, whose names may be those of others.

        Args:
            network: the opened `ckpt`.
            data: the opened `data`.
            settings: the settings, as a part of the name.
        """
        from uvit_decay.evaluation.extractor_cache import hash_metadata

        test = f"-{Path(self.test).stem}" if self.test else ""
        paths = [str(Path(path).resolve()) for path in (self.ckpt, self.test or "")]
        digest = hash_metadata({"files": paths, "images": data.fingerprint})
        return f"{network.name}-{data.name}{test}{settings}_{digest[:8]}"


def probe(
    *, probed: ProbedOptions, out: Path | None = None, loading: LoadingOptions, probing: Probing, alignment: Alignment
) -> None:
    """Probes of every layer and noise level, by published protocols.

    Args:
        out: folder for probes.csv, .json and .png, cknna.png, and noise_share.csv, .json and .png; default: in probes/,
            a telling name.
    """
    from uvit_decay.commands.opening import claim_outputs, open_program
    from uvit_decay.data.named import describe_data
    from uvit_decay.encoders.networks import open_network
    from uvit_decay.files.writing import remove_remains
    from uvit_decay.latents.autoencoder import decoder
    from uvit_decay.representations.noise import measure_noise_share
    from uvit_decay.representations.probe_protocols import GridProtocol, find_protocol
    from uvit_decay.representations.probing import Prober, check_probed, choose_images, open_probed_data
    from uvit_decay.representations.reference import ReferenceNetwork
    from uvit_decay.runtime.precision import chosen_precision

    if probing.layers == ("all",):
        probing = replace(probing, layers=None)
    needs_reference = False
    if probing.protocol != NOISE_ALONE:
        needs_reference = find_protocol(probing.protocol, GridProtocol).needs_reference
    if alignment != Alignment() and not needs_reference:
        raise UserError("--reference, --reference-size and --alignment-images are of --protocol repa")
    with open_program([probed.ckpt], loading.device) as (processes, device):
        network = open_network(probed.ckpt, loading)
        data = open_probed_data(network, probed.data, probed.test)
        about = {**network.about, **describe_data(data, network.fingerprint)}
        check_probed(network.net, network.path, data, probing)
        precision = chosen_precision(probed.precision, device)
        settings = f"{probing.name}{_suffix(precision)}"
        reference = None
        if needs_reference:
            options = LoadingOptions(trust=loading.trust)
            compared = open_network(alignment.reference, options, alignment.reference_size)
            autoencoder = decoder(network.latents, None, device)
            reference = ReferenceNetwork(compared, device, precision, probing.batch_size, autoencoder)
            settings += f"-{reference.network.name}{alignment.name}"
        out = out or Path("probes", probed.name_result(network, data, settings))
        with claim_outputs(out, processes=processes, folder=True):
            if processes.is_main:
                for name in ("probes.*", "cknna.*", "noise_share.*"):
                    remove_remains(out, name)
            features = None
            if reference is not None:
                _, test = choose_images(probing, data)
                features = reference.features(data, test, alignment.alignment_images, processes)
            net = network.net.to(device)
            grid = noise = None
            if probing.protocol != NOISE_ALONE:
                prober = Prober(net, network.path, data, probing, device, precision, features)
                grid = prober.grid(processes)
            if probing.draws_of_noise:
                noise = measure_noise_share(net, network.path, data, probing, device, precision, processes)
            if processes.is_main:
                _write_tables(out, grid, noise, network, about)
                print(f"wrote {out}")


def _write_tables(
    out: Path, grid: Grid | None, noise: NoiseTable | None, network: ProbedNetwork, about: dict[str, Any]
) -> None:
    """Write and print what was measured, and remove files of what was measured earlier and is not measured now."""
    from uvit_decay.representations.grid import Grid
    from uvit_decay.representations.noise import NoiseTable

    weights = network.about["weights"]
    if grid is None:
        Grid.remove(out)
    else:
        size = {} if noise is None else {"noise_share": noise.protocol["noise_share"]}
        grid.save(out, network.title, {**about, **size})
        print(grid.text(weights))
    if noise is None:
        NoiseTable.remove(out)
    else:
        noise.save(out, network.title, about)
        print(noise.text(weights))


def _suffix(precision: Precision) -> str:
    """Return the ending of a report's default name for a precision; float32 has none."""
    return "" if precision == "float32" else f"-{precision}"


def classify(
    *, probed: ProbedOptions, out: Path | None = None, loading: LoadingOptions, classification: Classification
) -> None:
    """Published protocols on frozen features: linear, kNN, few-shot.

    Args:
        out: report, a .json; default: in classify/, a telling name.
    """
    check_ending("--out", out, ".json")

    from uvit_decay.commands.opening import claim_outputs, open_program
    from uvit_decay.encoders.networks import open_network
    from uvit_decay.files.validation import write_json
    from uvit_decay.representations.classification import Classifying, format_report
    from uvit_decay.representations.probing import open_probed_data
    from uvit_decay.runtime.precision import chosen_precision

    with open_program([probed.ckpt], loading.device) as (processes, device):
        network = open_network(probed.ckpt, loading)
        data = open_probed_data(network, probed.data, probed.test)
        classifying = Classifying(network, data, classification)
        precision = chosen_precision(probed.precision, device)
        name = probed.name_result(network, data, f"{classification.name}{_suffix(precision)}")
        out = out or Path("classify", f"{name}.json")
        with claim_outputs(out, processes=processes):
            report = classifying.report(device, precision, processes)
            if report is not None:
                write_json(out, report)
                print(format_report(report))
                print(f"wrote {out}")


def reconstruct(options: Reconstruction) -> None:
    """Images, masked images and their reconstructions by a masked autoencoder."""
    check_ending("--out", options.out, ".png")

    from uvit_decay import checkpoint
    from uvit_decay.commands.opening import claim_outputs, open_program, tell_what_was_read
    from uvit_decay.evaluation.open_by_name import open_images
    from uvit_decay.pictures import save_image, to_float
    from uvit_decay.representations.reconstruction import Reconstructor
    from uvit_decay.runtime.random import subset

    with (
        open_program(device=options.device) as (processes, device),
        claim_outputs(options.out, processes=processes),
    ):
        if not processes.is_main:
            return
        loaded = checkpoint.load(options.ckpt, options.weights, options.trust)
        reconstructor = Reconstructor(loaded.net.to(device), options.mask_ratio, options.seed)
        channels, side = loaded.net.channels, loaded.net.image_size
        images = open_images(options.images, channels, side)
        tell_what_was_read([images], processes)
        if images.shape != (channels, side, side):
            c, h, w = images.shape
            raise UserError(f"{options.images} has {w}x{h}x{c}, the network takes {side}x{side}x{channels}")
        chosen = subset(images, options.num, "reconstructions")

        def read(part: Sequence[int]) -> Tensor:
            return to_float(images.read(part).to(device))

        save_image(options.out, reconstructor.picture(read, chosen, options.batch_size))
        print(f"wrote {options.out}: {len(chosen)} of {images.name}, {options.mask_ratio:.0%} of their patches removed")
