"""Checkpoints that need nothing else: a network, its weights, and how to sample from it, in one file.

Two forms are read: Lightning's .ckpt from training (raw weights, EMA weights, optimizer) and the exported .safetensors
(one set of weights, the description as JSON in its header). Official U-ViT and SiT files are imported and exported:
python -m uvit_decay.checkpoint {import,export}. No code from a file is ever run: tensors are unpickled with
weights_only, and the classes that a file names must be this package's, or be named by the caller. Nothing is built from
a file before its checksums, its description, and names, shapes and finiteness of its weights are found right.
"""

from uvit_decay.checkpoint.files import read_training_checkpoint
from uvit_decay.checkpoint.loading import Checkpoint, load

__all__ = ["Checkpoint", "load", "read_training_checkpoint"]
