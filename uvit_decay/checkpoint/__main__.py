"""python -m uvit_decay.checkpoint {export,import} SOURCE TARGET [options]"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import get_args

from uvit_decay.checkpoint.convert import export, import_official
from uvit_decay.checkpoint.official.recognized import PATHS, STABLE_DIFFUSION, ImportOptions
from uvit_decay.diffusion.prediction import Prediction
from uvit_decay.nn.sit import Wiring
from uvit_decay.runtime.errors import user_errors
from uvit_decay.sampling_options import check_numbers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m uvit_decay.checkpoint", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    command = commands.add_parser("export", help="write one set of weights of a checkpoint of this project")
    command.add_argument("source", type=Path, help="a .ckpt from training, or a .safetensors")
    command.add_argument("target", type=Path, help="a .safetensors, or a .pth or .pt in the official layout")
    command.add_argument("--weights", choices=("ema", "raw"), help="default: EMA where the run kept them")

    command = commands.add_parser("import", help="turn an official U-ViT or SiT file into a checkpoint of this project")
    command.add_argument("source", type=Path, help="an official .pth or .pt, or a U-ViT's folder <step>.ckpt")
    command.add_argument("target", type=Path, help="the .safetensors file to write")
    command.add_argument("--weights", choices=("ema", "raw"), help="default: EMA")
    command.add_argument("--alpha-min", type=float, help="of a decayed network; default: 1, but needed with long skips")
    command.add_argument("--heads", type=int, help="attention heads; default: those of the published size")
    command.add_argument("--num-classes", type=int, help="without the null label; default: from the rows for labels")
    command.add_argument("--path", choices=tuple(PATHS), help="default: SiT linear, U-ViT vp, its size H sd-discrete")
    command.add_argument("--prediction", choices=get_args(Prediction), help="default: SiT velocity, U-ViT eps")
    command.add_argument("--wiring", choices=get_args(Wiring), help="of a SiT; decayed adds silent long skips")
    command.add_argument("--vae", help=f"autoencoder of the latents; default: {STABLE_DIFFUSION['vae']}")
    return parser


def main(args: Sequence[str]) -> None:
    """Run the command that `args` name and print what was written."""
    options = _parser().parse_args(args)
    check_numbers(options)
    if options.command == "export":
        note = export(options.source, options.target, options.weights)
    else:
        hints = ImportOptions(**{field.name: getattr(options, field.name) for field in fields(ImportOptions)})
        note = import_official(options.source, options.target, options.weights, hints)
    if note:
        print(note)
    print(f"wrote {options.target} ({options.target.stat().st_size / 2**20:.1f} MiB)")


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
