"""Small official files and imported files for the tests of checkpoints; of U-ViTs, unless they name SiT or MAE."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import mae_reference
import sit_reference
import torch
from reference import random_values
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from uvit_reference import SMALL, VARIANTS, random_state

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.convert import import_official
from uvit_decay.checkpoint.official.common import StateDict
from uvit_decay.checkpoint.official.sit import remove_sigma
from uvit_decay.checkpoint.options import ImportOptions
from uvit_decay.files.instantiate import Spec
from uvit_decay.nn import UViT

HERE = Path("file.pth")
TINY = ImportOptions(heads=SMALL["heads"])
TINY_ENCODER = ImportOptions(heads=mae_reference.SMALL["heads"])
TINY_MAE = replace(TINY_ENCODER, decoder_heads=mae_reference.SMALL["decoder_heads"])
CASES = {**VARIANTS, "labels": dict(num_classes=10), "latents": dict(channels=4)}  # 11 rows: 10 classes and none
del CASES["time-1000"]  # which no file tells


def tiny(**options):
    return random_state(**SMALL | options)


def tiny_sit(**options):
    return sit_reference.random_state(**sit_reference.SMALL | options)


def meta(shapes):
    """Return a state_dict without memory."""
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def change_state(state, *without, **entries):
    """Return a state_dict without entries of these prefixes, and with new ones; __ in their names means a dot."""
    kept = {name: value for name, value in state.items() if not name.startswith(without)}
    return kept | {name.replace("__", "."): value for name, value in entries.items()}


def save_contents(contents, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(contents, path)
    return path


def plain_head(state):
    """Return the official state_dict of a SiT without the rows that learn_sigma adds."""
    return remove_sigma(StateDict(state, "SiT", HERE))[0].state


def read_description(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["uvit_decay"])


def import_and_load(contents, tmp_path, hints=TINY):
    """Import a file with these contents, and load it."""
    import_official(save_contents(contents, tmp_path / "official.pth"), tmp_path / "ours.safetensors", None, hints)
    return load(tmp_path / "ours.safetensors")


def is_close(a, b):
    return a.std() > 0.1 and torch.allclose(a, b, atol=1e-4 * b.abs().max().item())


def redescribe(file, **values):
    """Change the metadata of a file of ours."""
    save_file(load_file(file), file, {"uvit_decay": json.dumps({**read_description(file), **values})})


def ours(tmp_path, **options):
    """Export a checkpoint of a tiny network with these options."""
    import_and_load(tiny(), tmp_path)
    return _holding(UViT(**SMALL | options), tmp_path / "ours.safetensors")


def our_sit(tmp_path, **options):
    """Export a checkpoint of a tiny SiT, with random weights instead of zeros."""
    import_and_load(tiny_sit(), tmp_path)
    return _holding(sit_reference.loaded(**options), tmp_path / "ours.safetensors")


def our_encoder(tmp_path, kind, **options):
    """Export a checkpoint of an MAE or a ViT, with random weights in every layer."""
    import_and_load(mae_reference.finetuned_file(**mae_reference.SMALL), tmp_path, TINY_ENCODER)
    net = kind(**options)
    state = random_values({name: value.shape for name, value in net.named_parameters() if name != "alphas"}, 3)
    net.load_state_dict(net.state_dict() | state)
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            module.running_mean.normal_(generator=torch.Generator().manual_seed(4))
            module.running_var.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(5))
    return _holding(net, tmp_path / "ours.safetensors")


def _holding(net, path):
    """Replace the network of the checkpoint at `path`."""
    card = read_description(path)
    card["net"] = asdict(Spec.of(type(net), net.config))
    card["class_names"] = [str(label) for label in range(net.num_classes)]
    if net.channels != 4:
        card["latents"] = None
    save_file(net.state_dict(), path, {"uvit_decay": json.dumps(card)})
    return path


def change_training(trained, tmp_path, change):
    """Copy the .ckpt, with contents that `change` has changed."""
    contents = torch.load(trained, weights_only=True)
    change(contents)
    return save_contents(contents, tmp_path / "changed.ckpt")
