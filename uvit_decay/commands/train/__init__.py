"""Train a network, check a run before it starts, or measure the loss of a checkpoint.

    python train.py fit [--config configs/<experiment>.yaml] [--model.net.alpha_min 1.0] [--trainer.max_steps 500] ...
    python train.py doctor ...the flags of fit: check the machine, the nodes and the disks, and estimate time and memory
    python train.py validate [--config ...] --ckpt_path runs/.../last.ckpt

Without --config it is configs/digits.yaml, which trains on a CPU in minutes, or configs/pictures.yaml if --data or
--data.path names other data. A configuration is a file, or one of the package if there is no such file: --config digits
or configs/digits.yaml. Every setting of a configuration is a flag, and all flags of Lightning's Trainer are there as
--trainer.<flag>. Flags have underscores; hyphens are accepted, too.

    --config digits                 a configuration: a file, or the name of one of the package
    --data.path FOLDER              the images, or their latents
    --model.net.alpha_min 0.7       how much of the shortcut is left at the last block; 1.0 is the ordinary network
    --data.batch_size 256           the global batch, over all devices
    --trainer.max_steps 100000      the length of the run
    --model.optim.lr 1e-4           the learning rate
    --ckpt_path auto                resume from the newest checkpoint of this run, or start it

More flags:           python train.py fit --help
All flags:            python train.py fit --help_all
Flags of a class:     python train.py fit --model.net.help uvit_decay.nn.UViT
Settings, no run:     python train.py fit ... --print_config
Classes of your own:  --trust yours allows the classes of the module `yours`
"""

import time
from collections.abc import Sequence

from uvit_decay.commands.train.help import ABOUT, SUBCOMMANDS, format_fit_help
from uvit_decay.commands.train.words import CONFIG_FLAGS, list_given, names_other_data
from uvit_decay.runtime.signals import stoppable
from uvit_decay.terminal.command_line import respell
from uvit_decay.terminal.errors import UserError, user_errors
from uvit_decay.terminal.program import DEFAULT_CONFIG, PICTURES_CONFIG, find_bundled, localise, quiet_libraries
from uvit_decay.terminal.suggestions import did_you_mean

DOCTOR = "doctor"
HELP = {"-h", "--help"}
HELP_ALL = "--help_all"


def main(words: Sequence[str]) -> None:
    """Run a command line of train.py; exit with one line on a user's mistake."""
    with user_errors(), stoppable():
        _run(words)


def _run(words: Sequence[str]) -> None:
    began = time.monotonic()
    quiet_libraries()
    args = respell(words, "-", "_")
    if len(args) == 1 and args[0] in HELP:
        print(localise(__doc__))
        return
    if args and args[0] in ABOUT and HELP & set(args):
        print(format_fit_help(args[0]))
        return
    args = ["--help" if arg == HELP_ALL else arg for arg in args]
    known = (*SUBCOMMANDS, DOCTOR)
    if not set(known) & set(args):
        word = args[0] if args else "nothing"
        hint = did_you_mean(word, known)
        raise UserError(f"the subcommands of train.py are {', '.join(known)}: got {word}{hint}")
    named = any(arg.partition("=")[0] in CONFIG_FLAGS for arg in args)
    if args[0] in known and not named:
        default = PICTURES_CONFIG if names_other_data(list_given(args)) else DEFAULT_CONFIG
        args[1:1] = ["--config", str(find_bundled(default))]
    from uvit_decay.commands.train.launch import Launch  # imports Lightning, which takes seconds

    if args[0] == DOCTOR:
        from uvit_decay.commands.doctor import Doctor  # imports every check

        Doctor.run(args, began)
    else:
        Launch.run(args, began)
