"""Official U-ViT files (Bao et al., CVPR 2023; github.com/baofff/U-ViT): recognition and settings.

A decayed U-ViT has the same names and shapes, so no file determines alpha_min. The names of weights are the same as in
`UViT`, except for the buffer `alphas`.
"""

from __future__ import annotations

from typing import Any

import torch

from uvit_decay.checkpoint.official.common import PATHS, RecognisedModel, StateDict, build_on_meta
from uvit_decay.checkpoint.options import ImportOptions
from uvit_decay.diffusion.protocols import SAMPLING_PROTOCOLS
from uvit_decay.diffusion.sampling import DiffusionModel
from uvit_decay.nn.sizes import UVIT_SIZES
from uvit_decay.nn.uvit import UViT
from uvit_decay.terminal.errors import UserError

NULL_LABELLED = (1001, 101, 11)  # rows of label tables with a null label: ImageNet, ImageNet-100, CIFAR-10


def recognise(loaded: StateDict, options: ImportOptions) -> RecognisedModel:
    """Return the network of a file that resembles a U-ViT's; raise a UserError if file or options do not fit."""
    if options.path == "ddpm-linear":
        raise UserError(f"{loaded.where} is a U-ViT, ddpm-linear is the path of a DiT: give another `path`")
    config = _config(loaded)
    size, config["heads"] = loaded.size(config, options.heads, UVIT_SIZES)
    table = "label_emb.weight"
    config["num_classes"], config["null_label"] = loaded.labels(table, options.num_classes, NULL_LABELLED)
    config["alpha_min"] = 1.0 if options.alpha_min is None else options.alpha_min
    usual_path = "sd-discrete" if size == "uvit-h" else "vp"
    path = options.path or usual_path
    config["time_scale"] = 1000.0 if path == "sd-discrete" else 999.0
    latents = loaded.latents(config["channels"], options.vae)
    net = build_on_meta(UViT, **config)
    prediction = options.prediction or "eps"
    model = DiffusionModel.from_net(net, PATHS[path], prediction, torch.device("meta"))
    sampling = model.unguided(SAMPLING_PROTOCOLS["uvit"].sampling(model))
    return RecognisedModel(net, loaded.weights_for(net), size, path, prediction, sampling, latents)


def _config(loaded: StateDict) -> dict[str, Any]:
    """Return the arguments of `UViT` that names and shapes determine."""
    prefix_tokens = 2 if "label_emb.weight" in loaded.state else 1  # time and label
    image = loaded.image_layout("patch_embed.proj", num_prefix_tokens=prefix_tokens)
    return image | {
        "depth": 2 * loaded.blocks("in_blocks", "out_blocks"),
        "mlp_ratio": loaded.shape("in_blocks.0.mlp.fc1.weight", 2)[0] / image["dim"],
        "skip": "out_blocks.0.skip_linear.weight" in loaded.state,
        "conv": "final_layer.weight" in loaded.state,
        "mlp_time_embed": "time_embed.0.weight" in loaded.state,
        "qkv_bias": "in_blocks.0.attn.qkv.bias" in loaded.state,
    }
