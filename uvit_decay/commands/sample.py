"""Sample images from a checkpoint: python sample.py [--ckpt runs/.../last.ckpt] [--num 64] [--out samples.png] ...

Image i is a function of (checkpoint, seed, i, label) alone, whatever the batch size. Options that are not given are
those that the checkpoint recommends. --out is a grid (.png), an array for evaluation (.npz) or a folder of PNGs, which
the same command completes after an interruption. On P processes, which write what one does:

    torchrun --nproc_per_node P -- sample.py --num 50000 --out samples.npz
    accelerate launch --multi_gpu --num_processes P --num_machines 1 --mixed_precision no --dynamo_backend no \\
        sample.py --num 50000 --out samples.npz

torchrun takes --num for an abbreviation of an option of its own unless -- stands before the script. It leaves -n alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from uvit_decay.generation.options import Count, SamplingOptions
from uvit_decay.terminal.command_line import run
from uvit_decay.terminal.program import find_bundled, localise

BUNDLED = find_bundled("checkpoints/digits.safetensors")


def sample(
    *,
    ckpt: Path = BUNDLED,
    num: Annotated[Count | None, "-n"] = None,
    out: Path = Path("samples.png"),
    compile: bool = False,
    sampling: SamplingOptions,
) -> None:
    """Sample images from a checkpoint.

    Args:
        ckpt: a .ckpt, .safetensors or exported folder; default: the bundled digits.
        num: images; default: 10 for each class, 64 without.
        out: .png, .npz or a folder.
        compile: torch.compile for the network: pays off for thousands of images; changes no image but by rounding.
    """
    from uvit_decay.commands.opening import open_program
    from uvit_decay.files.writing import claim_paths
    from uvit_decay.generation.files import check_output, write_samples
    from uvit_decay.generation.samples import Samples

    check_output(out, num)
    with open_program(sampling.files(ckpt), sampling.device) as (group, _):
        samples = replace(Samples.from_options(ckpt, sampling, group.local_rank), compiled=compile)
        if out.suffix.lower() == ".png":  # at most 10 classes, a column each
            classes = samples.classes if sampling.classes else samples.classes[:10]
            samples = replace(samples, classes=classes, at_random=sampling.labels == "random")
        if num is None:
            num = 10 * len(samples.classes) or 64
        with claim_paths(out, first=group.is_main):
            write_samples(samples, num, out, sampling.batch_size, group)


def main(words: Sequence[str]) -> None:
    """Run a command line of sample.py; exit with one line on a user's mistake."""
    run(sample, __doc__, localise("sample.py"), words)
