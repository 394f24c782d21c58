"""Train, sample and evaluate diffusion transformers with decayed identity shortcuts.

    uvit-decay train fit --config digits          train a network; train --help lists the other commands
    uvit-decay doctor --config digits             check a run and its machine before it starts
    uvit-decay sample --num 64 --out grid.png     images of a checkpoint, by default the bundled one
    uvit-decay evaluate probe --ckpt last.ckpt    metrics of images, probes, comparisons; evaluate --help lists them
    uvit-decay export last.ckpt model.safetensors   convert a training checkpoint to one file, or another layout
    uvit-decay import FILE model.safetensors      convert an official file to this project's format
    uvit-decay encode images latents              encode images to latents of an autoencoder
    uvit-decay --version

Each command has --help. `python -m uvit_decay` is the same program, for launchers. In a checkout, train.py, sample.py
and evaluate.py run the commands of these names.
"""

import sys
from importlib import import_module

from uvit_decay.terminal.errors import UserError, user_errors
from uvit_decay.terminal.suggestions import did_you_mean

COMMANDS = {  # name -> the module in `commands` that runs it
    "train": "train",
    "doctor": "train",
    "sample": "sample",
    "evaluate": "evaluate",
    "export": "convert",
    "import": "convert",
    "encode": "encode",
}
PROGRAMS = ("train", "sample", "evaluate")  # their modules read only the words after the name, others all words


def main() -> None:
    """Run the command that sys.argv names; exit with one line on a user's mistake."""
    words = sys.argv[1:] or ["--help"]
    name = words[0]
    if name in COMMANDS:
        module = import_module(f"uvit_decay.commands.{COMMANDS[name]}")
        module.main(words[1:] if name in PROGRAMS else words)
        return
    with user_errors():
        if name in ("-h", "--help"):
            print(__doc__)
        elif name == "--version":
            import uvit_decay

            print(f"uvit_decay {uvit_decay.__version__}")
        else:
            hint = did_you_mean(name, COMMANDS)
            raise UserError(f"{name} is not a command of uvit-decay; the commands are {', '.join(COMMANDS)}{hint}")


if __name__ == "__main__":
    main()
