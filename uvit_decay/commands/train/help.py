"""The short help of `train.py fit` and `doctor`: the flags that most people set. It needs no import of torch."""

import re
import textwrap

from uvit_decay.terminal.program import CONFIGS, find_bundled, localise

WIDTH = 120

FIT = """usage: python train.py {command} [--config NAME] [flags]

{about} The flags that most people set, with values as examples:

the experiment
  --config digits                       a YAML file, or a configuration of the package, see below; default: digits, or
                                        pictures if --data or --data.path names other data, such as your own pictures
  --seed_everything 0                   seed of initial weights, batches and noise
  --ckpt_path auto                      resume from a checkpoint: a file; last, the newest one of the experiment; or
                                        auto, the newest one of this run, without which it starts
  --trainer.logger.experiment digits    the run folder is runs/digits/version_N
the data
  --data Images                         Images, AugmentedImages, CIFAR10, CIFAR100, HubDataset, Latents or Digits
  --data.path FOLDER                    folder, zip or tar of class folders
  --data.holdout 0.1                    fraction of the images that is held out for tests and probes
  --data.batch_size 256                 global batch, over all devices
  --data.device_batch_size 64           most images at a time on a device; gradients are accumulated
  --data.num_workers 8                  processes that read images
the network
  --model.net UViT                      UViT, SiT, or the class path of another network
  --model.net.image_size 32             height and width; images are cropped to it
  --model.net.channels 3                3 for RGB, 1 for grey
  --model.net.num_classes 2             0 for a network without labels
  --model.net.patch_size 2
  --model.net.dim 512                   width
  --model.net.depth 12                  number of blocks
  --model.net.heads 8                   attention heads
  --model.net.alpha_min 0.7             how much of the shortcut is left at the last block; 1.0 is the ordinary network
  --model.net.schedule linear           how it falls; other shortcuts: docs/shortcuts.md
the loss and the samples
  --model.path Linear                   noise path
  --model.prediction velocity           what the network predicts
  --model.label_dropout 0.1             fraction of images without label, for guidance
  --model.sampling.sampler dpm++        sampler of previews and metrics
  --model.sampling.steps 25
  --model.sampling.guidance 2.0         scale of guidance; 1 is none
the optimizer and the run
  --model.optim.lr 1e-4                 learning rate
  --model.optim.weight_decay 0.03
  --model.optim.warmup_steps 2500
  --model.optim.schedule cosine
  --trainer.max_steps 100000            length of the run; or --trainer.max_epochs 100
  --minutes 15                          its length in minutes, with reading and evaluation; the steps are measured
  --trainer.devices 1                   number of devices
  --trainer.precision bf16-mixed        32-true, or 16-mixed on CUDA GPUs; default: bf16-mixed where it is faster
  --trainer.gradient_clip_val 1.0       largest norm of the gradient

configurations of the package:
{configs}
all flags: python train.py {command} --help_all
flags of a class: python train.py fit --model.net.help uvit_decay.nn.UViT
settings of a run, without a run: python train.py fit ... --print_config
checks before a run: python train.py doctor ...
on two GPUs of a machine: torchrun --nproc_per_node 2 -- train.py fit ... --trainer.devices 2 --trainer.strategy ddp
"""
FIT_FLAGS = tuple(re.findall(r"^  (--[\w.]+)", FIT, re.MULTILINE))
SUBCOMMANDS = ("fit", "validate")  # of LightningCLI; validate is the loss of a checkpoint on the test set
ABOUT = {
    "fit": "Train a network.",
    "doctor": "Check the machine and a run before it starts, with the flags of fit.\n",
}


def format_fit_help(command: str) -> str:
    """Return the help of a command of ABOUT, with the names of the configurations of the package."""
    names = ", ".join(list_configs())
    paragraph = textwrap.fill(names, WIDTH, initial_indent="  ", subsequent_indent="  ")
    text = FIT.format(command=command, about=ABOUT[command], configs=paragraph)
    return localise(text.rstrip())


def list_configs() -> list[str]:
    """Return the names of the configurations of the package, such as "digits", in alphabetical order."""
    return sorted(path.stem for path in find_bundled(CONFIGS).glob("*.yaml"))
