"""Train, sample and evaluate diffusion transformers with decayed identity shortcuts.

    uvit-decay train fit --config digits          train a network; train --help names what else there is
    uvit-decay doctor --config digits             check a run and its machine before it starts
    uvit-decay sample --num 64 --out grid.png     images of a checkpoint, by default of the one in the package
    uvit-decay evaluate probe --ckpt last.ckpt    metrics of images, probes, comparisons; evaluate --help lists them
    uvit-decay export last.ckpt model.safetensors   a training checkpoint as one file, or in another layout
    uvit-decay import FILE model.safetensors      an official file as one of this project
    uvit-decay encode images latents              images as latents of an autoencoder
    uvit-decay --version

Each command has --help. `python -m uvit_decay` is the same program, for launchers. In a checkout, train.py, sample.py
and evaluate.py are the commands of these names.
"""

import sys
from importlib import import_module

from uvit_decay.runtime.command_line import did_you_mean
from uvit_decay.runtime.errors import UserError, user_errors

COMMANDS = {  # the module in `commands` that runs it
    "train": "train",
    "doctor": "train",
    "sample": "sample",
    "evaluate": "evaluate",
    "export": "convert",
    "import": "convert",
    "encode": "encode",
}
PROGRAMS = ("train", "sample", "evaluate")  # whose modules read what follows the name; others read the name, too


def main() -> None:
    """Run the command that sys.argv names; exit with one line on a user's mistake."""
    words = sys.argv[1:] or ["--help"]
    if module := COMMANDS.get(words[0]):
        import_module(f"uvit_decay.commands.{module}").main(words[1:] if words[0] in PROGRAMS else words)
        return
    with user_errors():
        if words[0] in ("-h", "--help"):
            print(__doc__)
        elif words[0] == "--version":
            import uvit_decay

            print(f"uvit_decay {uvit_decay.__version__}")
        else:
            hint = did_you_mean(words[0], COMMANDS)
            raise UserError(f"{words[0]} is no command of uvit-decay, which are {', '.join(COMMANDS)}{hint}")


if __name__ == "__main__":
    main()
