"""Official SiT files (Ma et al., ECCV 2024; github.com/willisma/SiT) and those of the decay's authors.

A released file is a bare state_dict; training writes a dict of `model`, `ema`, `opt` and `args`. Names are those of
`SiT`, except for the buffer `alphas`. The authors' files have encoder and decoder blocks, and record alpha_min only in
the arguments of a training run. A head with learn_sigma is converted to a plain one, which computes the same function.
DiT has the same names, but other times and another prediction: nothing in a file distinguishes the two.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from uvit_decay.checkpoint.detect import SIT, looks_like
from uvit_decay.checkpoint.io import Weights
from uvit_decay.checkpoint.official.recognized import ImportOptions, OfficialState, RecognizedModel
from uvit_decay.checkpoint.official.sit_layout import to_decayed_wiring, without_sigma
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.nn.sit import SiT
from uvit_decay.nn.sizes import SIT_SIZES
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.plain import typed

ENTRIES: dict[Weights, str] = {"ema": "ema", "raw": "model"}  # entries of a training file
ARGUMENTS: dict[str, tuple[str, dict[str, str]]] = {  # argument of a training run: (hint, its values)
    "path_type": ("path", {"Linear": "linear", "GVP": "gvp", "VP": "vp"}),
    "prediction": ("prediction", {"velocity": "velocity", "noise": "eps", "score": "score"}),
}
DECAY = "min_sigma"  # name of alpha_min among the authors' arguments
SAMPLING = Sampling("sit-sde", 250, clip=False)  # SiT's default; the decay paper does not specify it


def opened(contents: Any, weights: Weights, hints: ImportOptions, where: Path) -> tuple[Any, ImportOptions, int]:
    """Return one state_dict of a training file, the hints completed by its arguments, and its step.

    Contents of other files are returned unchanged, with the step 0.

    Raises:
        UserError: missing weights, an argument with an unknown value, or another alpha_min than the caller's.
    """
    if not isinstance(contents, Mapping) or SIT not in {looks_like(contents.get(name)) for name in ENTRIES.values()}:
        return contents, hints, 0
    name = ENTRIES[weights]
    if name not in contents:
        other = next(kind for kind in ENTRIES if kind != weights)
        raise UserError(f"{where} has no entry {name!r}, the {weights} weights: give --weights {other}")
    step = int(where.stem) if where.stem.isdecimal() else 0
    return contents[name], _with_arguments(hints, contents.get("args"), where), step


def _with_arguments(hints: ImportOptions, args: Any, where: Path) -> ImportOptions:
    """Return `hints` with missing values filled in from the arguments of the training run."""
    said = vars(args) if isinstance(args, Namespace) else args if isinstance(args, Mapping) else {}
    found: dict[str, Any] = {}
    for name, (hint, values) in ARGUMENTS.items():
        if name not in said or getattr(hints, hint) is not None:
            continue
        value = str(said[name])
        if value not in values:
            raise UserError(f"{where} was trained with {name} {value}, which is not known here: give --{hint}")
        found[hint] = values[value]
    if said.get(DECAY) is not None:
        found["alpha_min"] = typed(float, said[DECAY], f"{where}: {DECAY}")
        if hints.alpha_min not in (None, found["alpha_min"]):
            raise UserError(
                f"{where} was trained with {DECAY} {said[DECAY]}, not with alpha_min {hints.alpha_min:g}: "
                "leave out --alpha-min"
            )
    return replace(hints, **found)


def recognise(bare: OfficialState, hints: ImportOptions) -> RecognizedModel:
    """Return the network of a file that resembles a SiT's.

    Raises:
        UserError: names or shapes that are not a SiT's, no alpha_min for a decayed one, or hints that do not fit.
    """
    config = _sizes(bare)
    size, heads = bare.size(config, hints.heads, SIT_SIZES)
    num_classes, null_label = bare.labels("y_embedder.embedding_table.weight", hints.num_classes)
    rest = dict(num_classes=num_classes, null_label=null_label, alpha_min=_alpha_min(bare, config, hints))
    latents = bare.latents(config["channels"], hints.vae)
    net = _built(**config, heads=heads, **rest)
    state = _plain(bare).fitting(net)
    if hints.wiring not in (None, config["wiring"]):
        if config["wiring"] == "decayed":
            raise UserError(f"{bare.where} is a SiT with long skips, which the official wiring lacks: drop --wiring")
        net, state = _built(**net.config | {"wiring": "decayed"}), to_decayed_wiring(state, config["depth"])
    return RecognizedModel(net, state, size, hints.path or "linear", hints.prediction or "velocity", SAMPLING, latents)


def _built(**config: Any) -> SiT:
    with torch.device("meta"):  # names and shapes only
        return SiT(**config)


def _sizes(bare: OfficialState) -> dict[str, Any]:
    """Return the arguments of `SiT` that names and shapes determine."""
    image = bare.image_layout("x_embedder.proj", num_prefix_tokens=0)
    decayed = any(name.startswith(("enc_blocks.", "dec_blocks.")) for name in bare.state)
    first = "enc_blocks" if decayed else "blocks"
    config = image | {
        "depth": 2 * bare.blocks("enc_blocks", "dec_blocks") if decayed else bare.blocks("blocks"),
        "mlp_ratio": bare.shape(f"{first}.0.mlp.fc1.weight", 2)[0] / image["dim"],
        "wiring": "decayed" if decayed else "official",
    }
    if decayed and bare.shape("dec_blocks.0.skip.weight", 2)[1] == 2 * image["dim"]:
        config["skip"] = "concat"
    return config


def _alpha_min(bare: OfficialState, config: dict[str, Any], hints: ImportOptions) -> float:
    """Return the caller's alpha_min, or 1; raise a UserError for a decayed SiT with neither a hint nor alphas."""
    if hints.alpha_min is None and config["wiring"] == "decayed" and "alphas" not in bare.state:
        raise UserError(
            f"{bare.where} is a decayed SiT, whose weights do not tell alpha_min: give it with --alpha-min "
            "(its authors' default is 0.8)"
        )
    return 1.0 if hints.alpha_min is None else hints.alpha_min


def _plain(bare: OfficialState) -> OfficialState:
    """Return a state_dict without the outputs of learn_sigma, which computes the same function."""
    rows, _ = bare.shape("final_layer.linear.weight", 2)
    if bare.shape("final_layer.linear.bias", 1) != (rows,):
        raise bare.misfit("the weight and the bias of its final_layer.linear differ in rows")
    try:
        return replace(bare, state=without_sigma(bare.state))
    except UserError as error:
        raise bare.misfit(str(error)) from error
