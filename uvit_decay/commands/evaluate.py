"""Evaluate images and checkpoints: FID and other metrics, statistics, probes, reconstructions, runs.

    python evaluate.py generation --samples X --reference Y        # FID, IS, KID, precision and recall
    python evaluate.py probe --ckpt runs/.../last.ckpt             # every layer and noise level
    python evaluate.py classify --ckpt timm:vit_base_patch16_224.mae --data ...   # linear, kNN, few-shot
    torchrun --nproc_per_node 8 -- evaluate.py ...                 # on several GPUs

X and Y are a folder, zip or tar of images, an .npz, a data set such as cifar100:train, or one of a configuration
(configs/digits.yaml:train); Y may be an .npz of statistics, and --ckpt with --num evaluates samples as they are made.
"""

from collections.abc import Sequence
from importlib import import_module

from uvit_decay.terminal.command_line import run
from uvit_decay.terminal.program import localise

COMMANDS = {  # the module of each command; only the module of the given command is imported
    "generation": "generation",
    "statistics": "generation",
    "probe": "features",
    "classify": "features",
    "reconstruct": "features",
    "compare": "compare",
}


def main(words: Sequence[str]) -> None:
    """Run a command line of evaluate.py; exit with one line on a user's mistake."""
    names: Sequence[str] = list(COMMANDS)
    if words and words[0] in COMMANDS:
        names = [words[0]]
    commands = {}
    for name in names:
        module = import_module(f"uvit_decay.commands.{COMMANDS[name]}")
        commands[name] = getattr(module, name)
    run(commands, __doc__, localise("evaluate.py"), words)
