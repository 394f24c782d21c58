"""Judge generated images: python evaluate.py generation --samples X --reference Y [--metrics fid,is,kid,prc,sfid] ...

X is a folder, zip or tar of images, or an .npz; with --ckpt and --num the samples of a checkpoint are judged as they
are made. Y is one of these too, a data set such as cifar100:train, one of a configuration (configs/digits.yaml:train),
or an .npz of statistics, which `python evaluate.py statistics Y --out stats.npz` writes. On several GPUs:
torchrun --nproc_per_node 8 -- evaluate.py ...
"""

from uvit_decay.compare.report import compare
from uvit_decay.evaluation.commands import generation, likelihood, statistics
from uvit_decay.representations.commands import features, probe
from uvit_decay.runtime.command_line import run

COMMANDS = {
    "generation": generation,
    "statistics": statistics,
    "probe": probe,
    "features": features,
    "likelihood": likelihood,
    "compare": compare,
}

if __name__ == "__main__":
    run(COMMANDS, __doc__)
