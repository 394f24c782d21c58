"""MAE files that are not quite one, and options that do not fit them: each is refused in one line."""

from argparse import Namespace
from dataclasses import replace

import mae_reference as reference
import pytest
import torch
from mae_reference import SMALL
from official_files import TINY_ENCODER, TINY_MAE, imported, our_encoder

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.official.common import ImportOptions
from uvit_decay.nn import MAE, ViT
from uvit_decay.runtime.errors import UserError

PLAIN = replace(TINY_MAE, alpha_min=1.0)
SIZE = {name: value for name, value in SMALL.items() if not name.startswith("decoder")}


def changed(remove=(), wiring="official", **entries):
    state = reference.random_state(**SMALL | dict(wiring=wiring))
    state = {name: value for name, value in state.items() if not name.startswith(tuple(remove) or "?")}
    return state | {name.replace("__", "."): value for name, value in entries.items()}


def encoder(remove=(), **entries):
    state = reference.finetuned_file(**SMALL)["model"]
    state = {name: value for name, value in state.items() if not name.startswith(tuple(remove) or "?")}
    return state | {name.replace("__", "."): value for name, value in entries.items()}


MAES = {
    "no-decoder": (changed(["decoder_"]), r"but it lacks decoder_embed\.weight"),
    "no-decoder-blocks": (changed(["decoder_blocks."]), r"but it lacks decoder_blocks\.0\.norm1"),
    "missing-decoder-block": (changed(["decoder_blocks.1."]), r"but it lacks decoder_blocks\.1\.norm1"),
    "missing-skip": (changed(["skip.1."], "decayed"), r"but it lacks skip\.1\.mask_token"),
    "half-a-skip": (changed(["skip.1.fc"], "decayed"), r"but it lacks skip\.1\.fc\.0"),
    "more-skips": (changed(wiring="decayed", skip__7__mask_token=torch.zeros(1, 1, 16)), r"has skip\.7\.mask_token"),
    "no-token": (changed(["mask_token"]), "without skips sees no image"),
    "both-tokens": (changed(decoder_cls_token=torch.zeros(1, 1, 24)), "but it has decoder_cls_token, which no offici"),
    "decoder-rank": (changed(decoder_embed__weight=torch.zeros(24)), r"decoder_embed\.weight has the shape \(24,\)"),
    "positions": (changed(decoder_pos_embed=torch.zeros(1, 16, 24)), r"decoder_pos_embed has the shape \(1, 16, 24\)"),
    "oblong-patches": (changed(patch_embed__proj__weight=torch.zeros(16, 3, 4, 2)), r"has the shape \(16, 3, 4, 2\)"),
    "whole-numbers": (changed(mask_token=torch.zeros(1, 1, 24, dtype=torch.int64)), "its mask_token is of torch.int64"),
    "alphas": (changed(alphas=torch.full((8,), 0.5)), r"alphas from 0\.5 to 0\.5, not with alpha_min 1: give --alpha"),
    "huge-number": (changed(**{"decoder_blocks__1000000000__norm1__bias": torch.zeros(24)}), "no official masked"),
}  # fmt: skip
ENCODERS = {
    "no-bias": (encoder(["head.bias"]), r"but it lacks head\.bias"),
    "both-norms": (encoder(norm__bias=torch.zeros(16)), r"but it has norm\.bias, which no official vision transformer"),
    "head": (encoder(head__weight=torch.zeros(5, 17)), r"its head\.weight has the shape \(5, 17\), not \(5, 16\)"),
    "deep-head": (encoder(["head."], head__1__weight=torch.zeros(5, 16)), r"but it lacks head\.0\.running_mean"),
    "pixels": (encoder(patch_embed__proj__weight=torch.zeros(16, 4, 2, 2)), None),
}


@pytest.mark.parametrize(("state", "message"), MAES.values(), ids=MAES)
def test_an_mae_that_does_not_fit_is_refused_with_what_is_wrong(tmp_path, state, message):
    with pytest.raises(UserError, match=message):
        imported({"model": state, "epoch": 3}, tmp_path, PLAIN)
    assert not (tmp_path / "ours.safetensors").exists()


@pytest.mark.parametrize(("state", "message"), ENCODERS.values(), ids=ENCODERS)
def test_an_encoder_that_does_not_fit_is_refused_with_what_is_wrong(tmp_path, state, message):
    if message is None:  # four channels: no ImageNet scale, but a network
        assert imported(state, tmp_path, TINY_ENCODER).net.config["pixels"] == "unit"
        return
    with pytest.raises(UserError, match=f"official.pth.*{message}"):
        imported(state, tmp_path, TINY_ENCODER)
    assert not (tmp_path / "ours.safetensors").exists()


FULL, ENCODER, TUNED = (
    kind(**SMALL) for kind in (reference.full_file, reference.pretrained_file, reference.finetuned_file)
)
DECAYED = reference.decayed_file(**SMALL)
RECORDED = reference.decayed_file(**SMALL, min_decay=0.7)
HINTS = [
    (FULL, TINY_ENCODER, "a decoder of width 24, which is not published: .* give them with --decoder-heads"),
    (FULL, replace(TINY_MAE, decoder_heads=5), "dim 24 is not divisible by heads 5"),
    (FULL, replace(TINY_MAE, decoder_heads=0), "decoder_heads must be at least 1"),
    (FULL, replace(TINY_MAE, path="vp"), "is a masked autoencoder: leave out --path, which it does not have"),
    (FULL, replace(TINY_MAE, num_classes=10), "is a masked autoencoder: leave out --num-classes"),
    (FULL, replace(TINY_MAE, vae="a/vae"), "is a masked autoencoder: leave out --vae"),
    (DECAYED, TINY_MAE, r"is a decayed masked autoencoder, whose weights do not determine .*--alpha-min .*0\.6.*0\.7"),
    (RECORDED, PLAIN, r"was trained with min_decay 0\.7, not with alpha_min 1: leave out --alpha-min"),
    ({**RECORDED, "args": Namespace(min_decay="low")}, TINY_MAE, "min_decay must be float, it is 'low'"),
    ({**RECORDED, "args": Namespace(norm_pix_loss=3)}, PLAIN, "norm_pix_loss must be bool"),
    (ENCODER, TINY_MAE, r"has an encoder but no decoder: import a file that has one, such as mae_.*_full\.pth"),
    (ENCODER, replace(TINY_ENCODER, norm_pix=False), "has an encoder but no decoder"),
    (ENCODER, replace(TINY_ENCODER, num_classes=10), "has no classifier, not one of 10: leave out --num-classes"),
    (ENCODER, replace(TINY_ENCODER, prediction="eps"), "is a vision transformer: leave out --prediction"),
    (TUNED, replace(TINY_ENCODER, num_classes=10), "has a head of 5 classes, not one of 10: leave out --num-classes"),
    (TUNED, ImportOptions(), "no published size: .* with --heads"),
    ({"model": changed(["norm.", "decoder", "mask"])}, TINY_ENCODER, "is a decayed vision transformer, .*--alpha-min"),
]  # fmt: skip


@pytest.mark.parametrize(("contents", "hints", "message"), HINTS)
def test_an_option_that_is_missing_or_does_not_fit_is_said(tmp_path, contents, hints, message):
    with pytest.raises(UserError, match=message):
        imported(contents, tmp_path, hints)
    assert not (tmp_path / "ours.safetensors").exists()


def test_an_mae_makes_no_images(tmp_path):
    for kind, options in ((MAE, SMALL), (ViT, SIZE)):
        checkpoint = load(our_encoder(tmp_path, kind, **options))
        with pytest.raises(UserError, match="makes no images"):
            checkpoint.source(torch.device("cpu"))
