"""Exports this project's checkpoints, and imports official files of U-ViT, SiT, DiT and MAE."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from uvit_decay.checkpoint.options import ImportOptions, Weights
from uvit_decay.files.instantiate import Trusted
from uvit_decay.terminal.command_line import parse
from uvit_decay.terminal.errors import UserError, user_errors
from uvit_decay.terminal.program import PROGRAM, quiet_libraries


def export(
    source: Path,
    target: Path,
    weights: Weights | None = None,
    *,
    to: Literal["timm", "diffusers"] | None = None,
    vae: str | None = None,
    license: str | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    trust: Sequence[Trusted] = (),
) -> str:
    """Write one set of weights of a checkpoint of this project.

    Args:
        source: a .ckpt from training, or a .safetensors.
        target: a .safetensors, with the model card; a .pth or .pt in the official layout; a folder for diffusers, new
            or empty.
        weights: set to write: ema or raw; default: EMA if the run kept them.
        to: timm writes a ViT, or the encoder of an MAE, as a state_dict of timm's vision transformer, without a card;
            diffusers writes a denoiser as a folder that DiffusionPipeline.from_pretrained loads.
        vae: autoencoder to put there, hub id or folder; default: the autoencoder of the checkpoint's latents.
        license: licence of the weights for its README.md, as the Hub writes it, such as mit or cc-by-nc-4.0; default:
            unknown.
        dtype: type of the parameters in a .safetensors; bfloat16 halves the file, which is read as float32.
        trust: module to import, which registers the schedule or the sampler of the checkpoint; may be given again.

    Returns:
        Notes for the user, or the lines of Python that read what was written.
    """
    if to == "diffusers":
        from uvit_decay.hub.folder import export_folder

        if dtype != "float32":
            raise UserError("--dtype is for .safetensors files: leave out --to diffusers")
        if trust:
            raise UserError("--trust: a folder of diffusers holds no code of yours: leave out --to diffusers")
        return export_folder(source, target, weights, vae, license)
    for option, value in {"--vae": vae, "--license": license}.items():
        if value is not None:
            raise UserError(f"{option} is for folders of diffusers: add --to diffusers, or leave it out")
    from uvit_decay.checkpoint.convert import export_file

    return export_file(source, target, weights, to=to, dtype=dtype, trusted=trust)


def import_(source: Path, target: Path, weights: Weights | None = None, *, options: ImportOptions) -> str:
    """Turn an official U-ViT, SiT, DiT or MAE file into a checkpoint of this project.

    Args:
        source: a state_dict as .pth or .safetensors, a training file of SiT, REPA, DiT or MAE, a checkpoint of
            Lightning, a U-ViT's folder <step>.ckpt with step.pth, nnet.pth and nnet_ema.pth, or the folder of a DiT of
            diffusers.
        target: the .safetensors file to write.
        weights: set to import, or the set that a bare file holds; default: ema if the file has an entry of it,
            otherwise raw; for a bare file ema, but raw for MAE and nnet.pth.
        options: settings that the file does not determine.

    Returns:
        A summary of the file for the user to verify, and notes on it, each a line.
    """
    from uvit_decay.checkpoint.convert import import_official

    return import_official(source, target, weights, options)


def main(args: Sequence[str]) -> None:
    """Run a command line of this module and print the name of the output; exit with one line on a user's mistake."""
    with user_errors():
        quiet_libraries()
        call = parse({"export": export, "import": import_}, args, __doc__, PROGRAM)
        note = call()
        if note:
            print(note)
        print(f"wrote {call.keywords['target']}")
