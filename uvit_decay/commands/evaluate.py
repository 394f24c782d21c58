"""Evaluate images and checkpoints: FID and other metrics, statistics, probes, figures of features, runs.

    python evaluate.py generation --samples X --reference Y        # FID, IS, KID, precision and recall
    python evaluate.py probe --ckpt runs/.../last.ckpt             # every layer and noise level
    python evaluate.py classify --ckpt timm:vit_base_patch16_224.mae --data ...   # linear, kNN, few-shot
    torchrun --nproc_per_node 8 -- evaluate.py ...                 # on several GPUs

X and Y are a folder, zip or tar of images, an .npz, a data set such as cifar100:train, or one of a configuration
(configs/digits.yaml:train); Y may be an .npz of statistics, and --ckpt with --num evaluates samples as they are made.
"""

from collections.abc import Sequence

from uvit_decay.commands.features import classify, features, probe, reconstruct
from uvit_decay.commands.generation import generation, statistics
from uvit_decay.compare.report import compare
from uvit_decay.runtime.command_line import run
from uvit_decay.runtime.program import localised

COMMANDS = {
    "generation": generation,
    "statistics": statistics,
    "probe": probe,
    "classify": classify,
    "features": features,
    "reconstruct": reconstruct,
    "compare": compare,
}
DROPPED = {"likelihood": "no command any more, but a function: uvit_decay.diffusion.likelihood.log_likelihood"}


def main(words: Sequence[str]) -> None:
    """Run a command line of evaluate.py; exit with one line on a user's mistake."""
    run(COMMANDS, __doc__, localised("evaluate.py"), words, DROPPED)
