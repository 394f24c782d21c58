"""Official SiT files (Ma et al., ECCV 2024; github.com/willisma/SiT) and files of the decay's authors.

A released file is a bare state_dict; training writes a dict of `model`, `ema`, `opt` and `args`. The names of weights
are the same as in `SiT`, except for the buffer `alphas`. The authors' files have encoder and decoder blocks, and record
alpha_min only in the arguments of a training run. A head with learn_sigma is converted to a plain head, which computes
the same function.

DiT has the same names, but other times and another prediction. A file is read as a DiT if the caller, the file name or
the recorded arguments say so. The second half of its head, a learned variance, is kept; in a SiT the second half is
never trained and is 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from uvit_decay.checkpoint.official import repa
from uvit_decay.checkpoint.official.common import PATHS, RecognisedModel, StateDict, build_on_meta
from uvit_decay.checkpoint.options import ImportOptions
from uvit_decay.diffusion.protocols import protocol_sampling
from uvit_decay.diffusion.sampling import DiffusionModel, Sampling
from uvit_decay.nn.sit import SiT
from uvit_decay.nn.sizes import SIT_SIZES
from uvit_decay.terminal.errors import UserError

ARGUMENTS: dict[str, tuple[str, dict[str, str]]] = {  # argument of a training run: (option, its values)
    # "linear", "cosine" and "v" are REPA's, see `repa.py`.
    "path_type": ("path", {"Linear": "linear", "GVP": "gvp", "VP": "vp", "linear": "linear", "cosine": "gvp"}),
    "prediction": ("prediction", {"velocity": "velocity", "noise": "eps", "score": "score", "v": "velocity"}),
}
DECAY = "min_sigma"  # name of alpha_min among the authors' arguments
SAMPLING = Sampling("sit-sde", 250, clip=False)  # SiT's default; the decay paper does not specify it
DIT = "dit"  # prefix of the names of its files and models, in upper or lower case
TRAINED = (
    "warning: the half of its head that a SiT does not use is not 0, so it was trained: if this is a DiT, import it "
    "with `path` ddpm-linear"
)
HEAD = ("final_layer.linear.weight", "final_layer.linear.bias")


def _complete(loaded: StateDict, options: ImportOptions) -> ImportOptions:
    """Return the options with missing values filled in from the arguments of the training run."""
    values: dict[str, Any] = {}
    for name, (option, known) in ARGUMENTS.items():
        if name not in loaded.arguments or getattr(options, option) is not None:
            continue
        value = str(loaded.arguments[name])
        if value not in known:
            raise UserError(f"{loaded.where} was trained with {name} {value}, which is not supported: give `{option}`")
        values[option] = known[value]
    if str(loaded.arguments.get("model")).lower().startswith(DIT) and options.path is None:
        values["path"] = "ddpm-linear"
    return replace(options, **values, alpha_min=loaded.recorded_alpha_min(DECAY, options.alpha_min))


def recognise(loaded: StateDict, options: ImportOptions) -> RecognisedModel:
    """Return the network of a file that resembles a SiT's; raise a UserError if file or options do not fit."""
    options = _complete(loaded, options)
    loaded, notes = repa.convert_file(loaded, options)
    usual_path = "ddpm-linear" if loaded.where.name.lower().startswith(DIT) else "linear"
    path = options.path or usual_path
    is_dit = path == "ddpm-linear"
    config = _config(loaded)
    decayed = config["wiring"] == "decayed"
    size, config["heads"] = loaded.size(config, options.heads, SIT_SIZES)
    table = "y_embedder.embedding_table.weight"
    config["num_classes"], config["null_label"] = loaded.labels(table, options.num_classes)
    config["alpha_min"] = loaded.alpha_min(options.alpha_min, decayed, "its authors' default is 0.8")
    latents = loaded.latents(config["channels"], options.vae)
    plain, unused = remove_sigma(loaded)
    if is_dit:
        plain = loaded
        config |= {"time": "dit", "learn_sigma": bool(unused), "learned_variance": bool(unused)}
    elif options.path is None and any(value.any() for value in unused):
        notes = (*notes, TRAINED)
    net = build_on_meta(SiT, **config)
    prediction = options.prediction or ("eps" if is_dit else "velocity")
    model = DiffusionModel.from_net(net, PATHS[path], prediction, torch.device("meta"))
    if model.learned_variance:
        sampling = protocol_sampling("dit", model)
    elif is_dit:
        sampling = Sampling("ddpm", 250, clip=False)
    else:
        sampling = SAMPLING
    return RecognisedModel(net, plain.weights_for(net), size, path, prediction, sampling, latents, decayed, notes=notes)


def _config(loaded: StateDict) -> dict[str, Any]:
    """Return the arguments of `SiT` that names and shapes determine."""
    image = loaded.image_layout("x_embedder.proj", num_prefix_tokens=0)
    decayed = any(name.startswith(("enc_blocks.", "dec_blocks.")) for name in loaded.state)
    if decayed:
        first, wiring = "enc_blocks", "decayed"
        depth = 2 * loaded.blocks("enc_blocks", "dec_blocks")
    else:
        first, wiring = "blocks", "official"
        depth = loaded.blocks("blocks")
    mlp_ratio = loaded.shape(f"{first}.0.mlp.fc1.weight", 2)[0] / image["dim"]
    config = image | {"depth": depth, "mlp_ratio": mlp_ratio, "wiring": wiring}
    if decayed and loaded.shape("dec_blocks.0.skip.weight", 2)[1] == 2 * image["dim"]:
        config["skip"] = "concat"
    return config


def remove_sigma(loaded: StateDict) -> tuple[StateDict, list[Tensor]]:
    """Remove the half of the head that a SiT with learn_sigma does not use; return the rest and the removed tensors.

    The head's rows are ordered (p, p, 2c) for patches of size p with c channels. The first c channels are kept, so that
    the function stays the same. The tensors share memory with the given ones.
    """
    _, channels, patch, _ = loaded.shape("x_embedder.proj.weight", 4)
    rows = loaded.shape(HEAD[0], 2)[0]
    plain = patch * patch * channels
    if rows not in (plain, 2 * plain):
        needed = f"a patch of {patch}x{patch}x{channels} needs {plain} or {2 * plain}"
        raise loaded.error(f"the head has {rows} rows, {needed}")
    if loaded.shape(HEAD[1], 1) != (rows,):
        raise loaded.error("the weight and the bias of its final_layer.linear differ in rows")
    if rows == plain:
        return loaded, []
    state = dict(loaded.state)
    removed = []
    for name in HEAD:
        first, second = loaded.state[name].unflatten(0, (-1, 2 * channels)).split(channels, dim=1)
        state[name] = first.flatten(0, 1)
        removed.append(second)
    return replace(loaded, state=state), removed
