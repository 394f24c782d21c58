"""Export of a checkpoint as a folder of diffusers: uvit-decay export ... --to diffusers."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import torch
from huggingface_hub import ModelCard as Readme
from huggingface_hub import ModelCardData
from safetensors import SafetensorError

from uvit_decay import __version__
from uvit_decay.autoencoder import Autoencoder, decoder
from uvit_decay.checkpoint import Checkpoint, load
from uvit_decay.checkpoint.io import INDEX, KEY, WEIGHTS
from uvit_decay.checkpoint.official.common import IMPORTED
from uvit_decay.class_names import synonyms
from uvit_decay.hub.bundle import bundle
from uvit_decay.hub.denoiser import DecayedDenoiser, SiTDenoiser, UViTDenoiser
from uvit_decay.hub.earlier import README, TAG, replaceable
from uvit_decay.hub.pipeline import DecayPipeline, code_of, write_files
from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.files import check_writable, claimed, refilling
from uvit_decay.runtime.tensor_files import load_tensors, save_tensors
from uvit_decay.sampling_options import Weights

TEMPLATE = Path(__file__).with_name("card.md.j2")
TASK = "unconditional-image-generation"  # the only one of the Hub for images without text, also by class
HUB_DATA = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}  # our names of sets: those of the Hub
KINDS: dict[type, type[DecayedDenoiser]] = {denoiser.kind: denoiser for denoiser in (UViTDenoiser, SiTDenoiser)}


def export_folder(
    source: Path, target: Path, weights: Weights | None = None, vae: str | None = None, license: str | None = None
) -> str:
    """Write a folder that `DiffusionPipeline.from_pretrained(target, trust_remote_code=True)` loads.

    The folder needs torch and diffusers, but not this package. It is a new one, an empty one, or one of an earlier
    export, of which only the files that the export wrote are replaced.
    Returns the lines of Python that load it; see `uvit-decay export --help`.
    """
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license):
        raise UserError(f"--license {license!r}: give its short name on the Hub, such as mit or cc-by-nc-4.0")
    replaceable(target)  # a UserError before anything is written
    check_writable(target, folder=True)
    checkpoint = load(source, weights)
    checkpoint.check_denoiser()
    autoencoder = decoder(checkpoint.card.latents, vae, "cpu")
    pipeline = pipeline_of(checkpoint, autoencoder)
    full = explained(f"cannot write {target}", SafetensorError)  # by which safetensors reports a full disk, too
    with claimed(target), refilling(target, INDEX, replaceable(target)) as folder, full:
        pipeline.save_pretrained(folder)
        metadata, state = load_tensors(folder / WEIGHTS, verify=False)  # gets the card, and checksums
        card = replace(checkpoint.card, latents=pipeline.denoiser.space)
        save_tensors(folder / WEIGHTS, state, {**metadata, KEY: json.dumps(card.to_dict())})
        write_files(folder, code_of(type(pipeline)), bundle(type(pipeline.denoiser)))
        model_card(checkpoint, target.resolve().name, license).save(folder / README)
    return _lines(target, checkpoint)


def pipeline_of(checkpoint: Checkpoint, autoencoder: Autoencoder | None = None) -> DecayPipeline:
    """Return the pipeline of a loaded denoiser, whose network it shares; `autoencoder` decodes its latents."""
    kind, net = KINDS[type(checkpoint.net)], checkpoint.net
    latents = autoencoder and asdict(autoencoder.space)
    if latents and Path(latents["vae"]).is_dir():
        latents["vae"] = Path(latents["vae"]).name
    path = {"name": type(checkpoint.path).__name__, **asdict(checkpoint.path)}
    with torch.device("meta"):  # its own network is replaced
        denoiser = kind(net.config, path, checkpoint.card.prediction, latents)
    denoiser.net = net
    denoiser.eval()
    if autoencoder is not None:
        autoencoder.net.register_to_config(_name_or_path=latents["vae"])
    labels = {str(number): _label(name) for number, name in enumerate(checkpoint.card.class_names)}
    return DecayPipeline(denoiser, autoencoder and autoencoder.net, labels, asdict(checkpoint.card.sampling))


def _label(name: str) -> str:
    """Return all names of a class, as diffusers' pipelines have them: "tench, Tinca tinca, n01440764"."""
    words = ", ".join(synonyms(name))
    return words if words == name else f"{words}, {name}"


def _lines(target: Path, checkpoint: Checkpoint) -> str:
    """Return lines of Python that sample from the folder."""
    call = "class_labels=[0]" if checkpoint.net.num_classes else "num_images=1"
    return (
        "diffusers reads it with\nimport torch\nfrom diffusers import DiffusionPipeline\n"
        f"pipe = DiffusionPipeline.from_pretrained({str(target)!r}, trust_remote_code=True)\n"
        f"image = pipe({call}, generator=torch.Generator().manual_seed(0)).images[0]"
    )


# ---- README.md: what the model is, how to use it, its licence, and metadata for the Hub


def model_card(checkpoint: Checkpoint, name: str, license: str | None = None) -> Readme:
    """Return the README.md of a folder with this denoiser, under this name; `license` is that of its weights."""
    net, card, data = checkpoint.net, checkpoint.card, HUB_DATA.get(checkpoint.card.data)
    kind = "class-conditional" if net.num_classes else "unconditional"
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
        name=plain(name),
        place=repr(name),
        kind=f"{kind} {type(net).__name__}",
        net=net,
        parameters=sum(parameter.numel() for parameter in net.parameters()),
        schedule=plain(str(net.config["schedule"]))[:60],
        card=card,
        data=plain(card.data),
        call=f"class_labels={list(range(min(net.num_classes, 4)))}" if net.num_classes else "num_images=4",
        licence=license,
        imported=card.data.startswith(IMPORTED),
        version=__version__,
    )


def plain(text: str) -> str:
    """Return text of one line without marks of Markdown and lone surrogates; names may come from any file."""
    text = text.encode(errors="backslashreplace").decode()
    return re.sub(r"([|<>`*\[\]\\])", r"\\\1", " ".join(text.split()))
