"""Self-contained checkpoints: a network, its weights and its model card in one file.

Two formats are read: Lightning's .ckpt from training (raw weights, EMA weights, optimizer) and exported .safetensors
(one set of weights, with the card as JSON in the header). Official U-ViT, SiT, DiT and MAE files are imported and
exported by uvit-decay {import,export}. Loading never executes code from a file: tensors are unpickled with
weights_only, and a class that a file names must belong to this package or be listed by the caller. Weights are loaded
into a network only after their names, shapes and finiteness, the checksums and the card have been checked.
"""

from uvit_decay.terminal.program import lazy

MODULES = {
    "Checkpoint": "io",
    "ModelCard": "io",
    "load": "io",
    "read_training_checkpoint": "io",
    "export_file": "convert",
    "import_official": "convert",
}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
