"""python -m uvit_decay.checkpoint {export,import} SOURCE TARGET [options]"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from uvit_decay.checkpoint import official
from uvit_decay.checkpoint.convert import export, import_official
from uvit_decay.errors import user_errors


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m uvit_decay.checkpoint", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    command = commands.add_parser("export", help="write one set of weights of a checkpoint of this project")
    command.add_argument("source", type=Path, help="a .ckpt from training, or a .safetensors")
    command.add_argument("target", type=Path, help="a .safetensors, or a .pth in the layout of the official U-ViT")
    command.add_argument("--weights", choices=("ema", "raw"), help="default: EMA where the run kept them")

    command = commands.add_parser("import", help="turn an official U-ViT file into a checkpoint of this project")
    command.add_argument("source", type=Path, help="an official .pth, or a folder <step>.ckpt")
    command.add_argument("target", type=Path, help="the .safetensors file to write")
    command.add_argument("--weights", choices=("ema", "raw"), help="default: EMA")
    command.add_argument("--alpha-min", type=float, default=1.0, help="of a decayed U-ViT; default: 1, not decayed")
    command.add_argument("--heads", type=int, help="attention heads; default: those of the published size")
    command.add_argument("--num-classes", type=int, help="without the null label; default: from the rows for labels")
    command.add_argument("--path", choices=tuple(official.PATHS), help="default: vp, for the size H sd-discrete")
    command.add_argument("--vae", help=f"autoencoder of the latents; default: {official.STABLE_DIFFUSION['vae']}")
    return parser


def main(args: Sequence[str]) -> None:
    options = _parser().parse_args(args)
    if options.command == "export":
        note = export(options.source, options.target, options.weights)
    else:
        chosen = (options.heads, options.num_classes, options.path, options.alpha_min, options.vae)
        note = import_official(options.source, options.target, options.weights, official.Hints(*chosen))
    if note:
        print(note)
    print(f"wrote {options.target} ({options.target.stat().st_size / 2**20:.1f} MiB)")


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
