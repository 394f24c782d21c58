"""Export of a checkpoint as a folder of diffusers: uvit-decay export ... --to diffusers."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from shutil import rmtree

import torch
from huggingface_hub import ModelCard as Readme
from huggingface_hub import ModelCardData
from safetensors import SafetensorError

from uvit_decay import __version__
from uvit_decay.checkpoint import Checkpoint, load
from uvit_decay.checkpoint.detect import KEY
from uvit_decay.checkpoint.io import WEIGHTS
from uvit_decay.checkpoint.official.common import IMPORTED
from uvit_decay.checkpoint.options import Weights
from uvit_decay.data.classes import synonyms
from uvit_decay.decay.table import BUILT_IN
from uvit_decay.files.tensor_files import load_tensors, save_tensors
from uvit_decay.files.writing import LOCK, check_writable, claim_paths, writing
from uvit_decay.hub.bundle import bundle
from uvit_decay.hub.denoiser import DecayedDenoiser, SiTDenoiser, UViTDenoiser
from uvit_decay.hub.pipeline import DecayPipeline, code_of, write_files
from uvit_decay.latents.autoencoder import Autoencoder, decoder
from uvit_decay.terminal.errors import UserError, escape_unprintable, explain
from uvit_decay.terminal.typed import check_types

README = "README.md"
UNFINISHED = ".unfinished"  # folder in which an export prepares its files; a killed export leaves it
TAG = "decayed-identity-shortcuts"  # in the metadata of README.md
TEMPLATE = Path(__file__).with_name("card.md.j2")
TASK = "unconditional-image-generation"  # the Hub's only task for images without text, also for classes
HUB_DATA = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}  # our name of a data set: the Hub's name
KINDS: dict[type, type[DecayedDenoiser]] = {UViTDenoiser.kind: UViTDenoiser, SiTDenoiser.kind: SiTDenoiser}


@check_types
def export_folder(
    source: Path, target: Path, weights: Weights | None = None, vae: str | None = None, license: str | None = None
) -> str:
    """Write a folder that `DiffusionPipeline.from_pretrained(target, trust_remote_code=True)` loads.

    The folder needs torch and diffusers, but not this package.

    Args:
        source: a checkpoint of a denoiser.
        target: a new or empty folder, or one in which an export was killed.
        weights: the set of weights; None takes EMA weights if the checkpoint has them.
        vae: folder or hub id of the autoencoder; None takes the one of the checkpoint.
        license: short name of the licence on the Hub, for README.md.

    Returns:
        The lines of Python that load the folder.
    """
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license):
        raise UserError(f"`license` {license!r}: give its short name on the Hub, such as mit or cc-by-nc-4.0")
    check_writable(target, folder=True)
    with claim_paths(target):
        for path in sorted(target.iterdir()):
            if path.name not in (LOCK, UNFINISHED):
                line = f"cannot export to {target}: the folder is not empty ({path.name})"
                raise UserError(f"{line}; give a new or an empty folder")
        checkpoint = load(source, weights)
        checkpoint.check_denoiser()
        schedule = checkpoint.net.config["schedule"]
        if isinstance(schedule, str) and schedule not in BUILT_IN:
            raise UserError(f"a folder cannot hold the code of the schedule {schedule}: export a .safetensors file")
        autoencoder = decoder(checkpoint.card.latents, vae, "cpu")
        readme = model_card(checkpoint, target.resolve().name, license)
        _write_folder(target, checkpoint, build_pipeline(checkpoint, autoencoder), readme)
    return _usage(target, checkpoint)


def _write_folder(target: Path, checkpoint: Checkpoint, pipeline: DecayPipeline, readme: Readme) -> None:
    """Write all files into an empty folder; an error leaves it empty."""
    folder = target / UNFINISHED
    rmtree(folder, ignore_errors=True)
    disk_errors = explain(f"cannot write {target}", SafetensorError)  # safetensors' error for a full disk
    with writing(target), disk_errors:
        try:
            pipeline.save_pretrained(folder)
            # diffusers' file of weights is written again, with the model card and checksums.
            metadata, state = load_tensors(folder / WEIGHTS, verify=False)
            card = replace(checkpoint.card, latents=pipeline.denoiser.space)
            save_tensors(folder / WEIGHTS, state, {**metadata, KEY: json.dumps(card.to_dict())})
            write_files(folder, code_of(type(pipeline)), bundle(type(pipeline.denoiser)))
            readme.save(folder / README)
            for entry in folder.iterdir():
                entry.replace(target / entry.name)
        finally:
            rmtree(folder, ignore_errors=True)


def build_pipeline(checkpoint: Checkpoint, autoencoder: Autoencoder | None = None) -> DecayPipeline:
    """Return the pipeline of a loaded denoiser, which shares its network; `autoencoder` decodes its latents."""
    net = checkpoint.net
    card = checkpoint.card
    latents = vae = None
    if autoencoder is not None:
        latents = asdict(autoencoder.space)
        vae = autoencoder.net
        if Path(latents["vae"]).is_dir():
            latents["vae"] = Path(latents["vae"]).name
        vae.register_to_config(_name_or_path=latents["vae"])
    path = {"name": type(checkpoint.path).__name__, **asdict(checkpoint.path)}
    with torch.device("meta"):  # its own network is replaced
        denoiser = KINDS[type(net)](net.config, path, card.prediction, latents)
    denoiser.net = net
    denoiser.eval()
    labels = {}
    for number, name in enumerate(card.class_names):
        words = ", ".join(synonyms(name))  # as diffusers has them: "tench, Tinca tinca, n01440764"
        labels[str(number)] = words if words == name else f"{words}, {name}"
    return DecayPipeline(denoiser, vae, labels, asdict(card.sampling))


def _usage(target: Path, checkpoint: Checkpoint) -> str:
    """Return the lines of Python that sample from the folder."""
    call = "class_labels=[0]" if checkpoint.net.num_classes else "num_images=1"
    return (
        "diffusers reads it with\nimport torch\nfrom diffusers import DiffusionPipeline\n"
        f"pipe = DiffusionPipeline.from_pretrained({str(target)!r}, trust_remote_code=True)\n"
        f"image = pipe({call}, generator=torch.Generator().manual_seed(0)).images[0]"
    )


# ---- README.md: what the model is, how to use it, its licence, and metadata for the Hub


def model_card(checkpoint: Checkpoint, name: str, license: str | None = None) -> Readme:
    """Return the README.md of a folder with this denoiser.

    Args:
        checkpoint: the denoiser.
        name: name of the folder, used as the title.
        license: licence of the weights; None if it is not known.
    """
    net = checkpoint.net
    card = checkpoint.card
    data = HUB_DATA.get(card.data)
    kind, call = "unconditional", "num_images=4"
    if net.num_classes:
        kind = "class-conditional"
        call = f"class_labels={list(range(min(net.num_classes, 4)))}"
    metadata = ModelCardData(
        library_name="diffusers",
        pipeline_tag=TASK,
        license=license or "unknown",
        tags=["uvit_decay", TAG, type(net).__name__.lower(), kind],
        datasets=data and [data],
    )
    return Readme.from_template(
        metadata,
        template_path=str(TEMPLATE),
        name=escape(name),
        place=repr(name),
        kind=f"{kind} {type(net).__name__}",
        net=net,
        parameters=sum(parameter.numel() for parameter in net.parameters()),
        schedule=escape(str(net.config["schedule"]))[:60],
        card=card,
        data=escape(card.data),
        call=call,
        licence=license,
        imported=card.data.startswith(IMPORTED),
        version=__version__,
    )


def escape(text: str) -> str:
    """Return text as one line with unprintable characters and Markdown escaped; names may come from any file."""
    line = escape_unprintable(" ".join(text.split()))
    return re.sub(r"([|<>`*\[\]\\])", r"\\\1", line)
