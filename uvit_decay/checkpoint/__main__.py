"""Exports this project's checkpoints, imports official files of U-ViT, SiT and MAE, and pushes folders to the Hub."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from uvit_decay.checkpoint.convert import export, import_official
from uvit_decay.hub.options import CardOptions
from uvit_decay.runtime.command_line import parse
from uvit_decay.runtime.errors import UserError, user_errors
from uvit_decay.runtime.program import PROGRAM, from_package
from uvit_decay.weights import Weights


def export_as(
    source: Path,
    target: Path,
    weights: Weights | None = None,
    *,
    to: Literal["timm", "diffusers"] | None = None,
    standalone: bool = False,
    vae: str | None = None,
    card: CardOptions,
) -> str:
    """Write one set of weights of a checkpoint of this project.

    Args:
        source: a .ckpt from training, or a .safetensors.
        target: a .safetensors, with the model card; a .pth or .pt in the official layout; a folder for diffusers.
        weights: set to write: ema, raw, or ema:DECAY, one of several averages; default: EMA if the run kept them.
        to: timm writes a ViT, or the encoder of an MAE, as a state_dict of timm's vision transformer, without a card;
            diffusers writes a denoiser as a folder that DiffusionPipeline.from_pretrained loads.
        standalone: put our code into that folder, which then needs torch and diffusers only.
        vae: autoencoder to put there, hub id or folder; default: that of the checkpoint's latents.

    Returns:
        What the user should know, or the lines of Python that read it.
    """
    if to == "diffusers":
        from uvit_decay.hub.folder import export_folder

        return export_folder(source, target, weights, vae, standalone, card)
    of_folder = {"--standalone": standalone, "--vae": vae is not None}
    given = {**of_folder, "--license": card.license, "--metrics": card.metrics, "--no-grid": not card.grid}
    for option in (option for option, value in given.items() if value):
        raise UserError(f"{option} is for folders of diffusers: add --to diffusers, or leave it out")
    return export(source, target, weights, to=to)


def push_folder(
    folder: Path, repository: str, *, private: bool = False, dry_run: bool = False, revision: str | None = None
) -> str:
    """Upload an exported folder to the Hugging Face Hub, in one commit; the repository is made if it is not there.

    The token is that of `hf auth login`, or HF_TOKEN.

    Args:
        folder: a folder of export --to diffusers, or of save_pretrained of a network.
        repository: USER/NAME or ORGANISATION/NAME on the Hub.
        private: make a new repository private.
        dry_run: list what would be uploaded, and stop.
        revision: branch, made if it is not there; default: main.

    Returns:
        What was uploaded, and where it is.
    """
    from uvit_decay.hub.push import push

    return push(folder, repository, private, dry_run, revision)


def main(args: Sequence[str]) -> None:
    """Run the command that `args` name and print what was written."""
    commands = {"export": export_as, "import": import_official, "push": push_folder}
    call = parse(commands, args, __doc__, PROGRAM if from_package() else "python -m uvit_decay.checkpoint")
    if note := call():
        print(note)
    target = call.keywords.get("target")
    if target is None:  # nothing was written here
        return
    files = target.rglob("*") if target.is_dir() else [target]
    print(f"wrote {target} ({sum(path.stat().st_size for path in files) / 2**20:.1f} MiB)")


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
