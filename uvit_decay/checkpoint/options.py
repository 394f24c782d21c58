"""Options of loading and importing a checkpoint, for command lines; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from uvit_decay.terminal.typed import check_types

Weights = Literal["ema", "raw"]
PathName = Literal["linear", "gvp", "vp", "sd-discrete", "ddpm-linear"]


@check_types
@dataclass(frozen=True)
class ImportOptions:
    """Settings that a file may not determine; defaults follow from the file and the published configurations.

    Args:
        heads: number of attention heads; default: from the published size.
        num_classes: number K of real classes; the file has K rows for labels, or K + 1 with a null label; default:
            from the rows.
        path: noise path; default: linear for SiT, vp for U-ViT, sd-discrete for its size H; ddpm-linear is the path of
            a DiT, which has SiT's layout, and the default of a file named DiT....
        prediction: quantity that the network predicts; default: velocity for SiT, eps for U-ViT and DiT.
        alpha_min: smallest alpha of the decayed shortcuts; default: 1, the official network; required with skips.
        vae: autoencoder of the latents, hub id or folder; default: stabilityai/sd-vae-ft-ema.
        decoder_heads: number of attention heads of an MAE's decoder; default: 16 for the published width 512.
        norm_pix: an MAE predicts normalised patches; default: yes, except for a file named mae_visualize....
        pixels: scale of the pixels of an MAE or ViT; default: imagenet for 3 channels, otherwise unit.
        classes: named class list, such as imagenet-1k, or text file with the name of label k in line k + 1; default:
            numbers.
        entry: entry of the file that holds the network, such as model_ema, or state_dict.model for the weights
            model.* of a Lightning module; default: ema, model_ema or state_dict_ema, otherwise model or state_dict.
    """

    heads: int | None = None
    num_classes: int | None = None
    path: PathName | None = None
    prediction: Literal["eps", "x", "velocity", "score"] | None = None
    alpha_min: float | None = None
    vae: str | None = None
    decoder_heads: int | None = None
    norm_pix: bool | None = None
    pixels: Literal["imagenet", "unit"] | None = None
    classes: str | None = None
    entry: str | None = None
