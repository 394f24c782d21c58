"""Official files that are not quite one, hostile ones, and options that do not fit: each is refused in one line."""

import functools
from argparse import Namespace
from dataclasses import replace

import mae_reference as reference
import pytest
import sit_reference
import torch
import uvit_reference
from conftest import same
from official_files import TINY, TINY_ENCODER, TINY_MAE, changed, imported, our_encoder, tiny, tiny_sit

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.official.common import ImportOptions
from uvit_decay.nn import MAE, UViT, ViT
from uvit_decay.runtime.errors import UserError

PLAIN = replace(TINY_MAE, alpha_min=1.0)
DECAYED = dict(wiring="decayed")
zeros = torch.zeros


def mae(*without, wiring="official", **entries):
    state = changed(reference.random_state(**reference.SMALL, wiring=wiring), *without, **entries)
    return {"model": state, "epoch": 3}


def encoder(*without, **entries):
    return changed(reference.finetuned_file(**reference.SMALL)["model"], *without, **entries)


UVITS = [
    (changed(tiny(), "norm.bias"), r"but it lacks norm\.bias"),
    (changed(tiny(), "pos_embed"), "but it lacks pos_embed"),
    (changed(tiny(), "in_blocks.1."), r"but it lacks in_blocks\.1\.norm1\.weight"),
    (changed(tiny(), norm3__bias=zeros(2)), r"but it has norm3\.bias, which no official U-ViT has"),
    (changed(tiny(), norm__bias=zeros(17)), r"its norm\.bias has the shape \(17,\), not \(16,\)"),
    (changed(tiny(), pos_embed=zeros(17, 16)), r"its pos_embed has the shape \(17, 16\)"),
    (changed(tiny(), patch_embed__proj__weight=zeros(0, 3, 2, 2)), r"has the shape \(0, 3, 2, 2\)"),
    (changed(tiny(), pos_embed=zeros(1, 16, 16)), "15 positions for patches, which is no square image"),
    (changed(tiny(), norm__bias=[0.0]), r"its norm\.bias is a list, not a tensor"),
    (changed(tiny(), module__norm__bias=zeros(16)), r"has both norm\.bias and module\.norm\.bias"),
    (changed(tiny(), alphas=zeros(0)), r"its alphas has the shape \(0,\)"),
    (changed(tiny(), alphas=torch.ones(10, dtype=torch.int64)), r"its alphas are of torch\.int64"),
    (changed(tiny(), alphas=torch.ones(3)), "give --alpha-min"),
    (changed(tiny(), pos_embed=zeros(1).expand(1, 10**10 + 1, 16)), "larger than the file"),
]
SITS = [
    (changed(tiny_sit(), "final_layer.linear.weight"), r"but it lacks final_layer\.linear\.weight"),
    (changed(tiny_sit(), "blocks."), r"but it lacks blocks\.0\.mlp\.fc1\.weight"),
    (changed(tiny_sit(**DECAYED), "dec_blocks."), r"but it lacks dec_blocks\.0\.skip\.weight"),
    (changed(tiny_sit(**DECAYED), "dec_blocks.1.skip.bias"), r"but it lacks dec_blocks\.1\.skip\.bias"),
    (tiny_sit() | tiny_sit(**DECAYED), r"but it has blocks\.0\..*, which no official SiT has"),
    (changed(tiny_sit(), t_embedder__mlp__2__bias=zeros(9)), r"its t_embedder\.mlp\.2\.bias has the shape \(9,\)"),
    (
        changed(tiny_sit(), final_layer__linear__weight=zeros(24, 16), final_layer__linear__bias=zeros(24)),
        "but the head has 24 rows, a patch of 2x2x4 needs 16 or 32",
    ),
    (changed(tiny_sit(), final_layer__linear__bias=zeros(17)), r"its final_layer\.linear differ in rows"),
    (changed(tiny_sit(), y_embedder__embedding_table__weight=zeros(4, 17)), r"has the shape \(4, 17\)"),
]
MAES = [
    (mae("decoder_"), r"but it lacks decoder_embed\.weight"),
    (mae("decoder_blocks."), r"but it lacks decoder_blocks\.0\.norm1"),
    (mae("decoder_blocks.1."), r"but it lacks decoder_blocks\.1\.norm1"),
    (mae("skip.1.", **DECAYED), r"but it lacks skip\.1\.mask_token"),
    (mae("skip.1.fc", **DECAYED), r"but it lacks skip\.1\.fc\.0"),
    (mae(**DECAYED, skip__7__mask_token=zeros(1, 1, 16)), r"has skip\.7\.mask_token"),
    (mae(decoder_cls_token=zeros(1, 1, 24)), "but it has decoder_cls_token, which no offici"),
    (mae(decoder_embed__weight=zeros(24)), r"decoder_embed\.weight has the shape \(24,\)"),
    (mae(decoder_pos_embed=zeros(1, 16, 24)), r"decoder_pos_embed has the shape \(1, 16, 24\)"),
    (mae(patch_embed__proj__weight=zeros(16, 3, 4, 2)), r"has the shape \(16, 3, 4, 2\)"),
    (mae(mask_token=zeros(1, 1, 24, dtype=torch.int64)), r"its mask_token is of torch\.int64"),
    (mae(alphas=torch.full((8,), 0.5)), r"alphas from 0\.5 to 0\.5, not with alpha_min 1: give --alpha"),
    (mae(decoder_blocks__1000000000__norm1__bias=zeros(24)), "no official masked"),
]
ENCODERS = [
    (encoder("head.bias"), r"but it lacks head\.bias"),
    (encoder(norm__bias=zeros(16)), r"but it has norm\.bias, which no official vision transformer"),
    (encoder(head__weight=zeros(5, 17)), r"its head\.weight has the shape \(5, 17\), not \(5, 16\)"),
    (encoder("head.", head__1__weight=zeros(5, 16)), r"but it lacks head\.0\.running_mean"),
]
OTHERS = [
    ({3: zeros(2), None: zeros(2)}, ""),
    ({"a\nb": zeros(2)}, r"holds a b"),
    (functools.reduce(lambda inner, _: dict.fromkeys(map(str, range(1000)), inner), range(4), zeros(1)), ""),
    ({"ema": tiny_sit(), "args": {"min_sigma": 10**400}}, "min_sigma must be float"),
    *(
        (state | {f"{blocks}.{number}.norm1.weight": zeros(16)}, "looks like a .*, but it (has|lacks) ")
        for state, blocks in ((tiny(), "in_blocks"), (tiny_sit(), "blocks"))
        for number in ("1000000000", "9" * 5000, "40")
    ),
]
FULL, ENCODER, TUNED = (
    kind(**reference.SMALL) for kind in (reference.full_file, reference.pretrained_file, reference.finetuned_file)
)
RECORDED = reference.decayed_file(**reference.SMALL, min_decay=0.7)
NO_NORM = changed(reference.random_state(**reference.SMALL), "norm.", "decoder", "mask")
SKIPS = tiny_sit(**DECAYED)
HINTS = [
    (tiny(), ImportOptions(), "width of 16 and a depth of 4, which is no published size: .* with --heads"),
    (tiny(), ImportOptions(heads=3), "dim 16 is not divisible by heads 3"),
    (tiny(), ImportOptions(heads=0), "heads must be at least 1"),
    (tiny(), replace(TINY, alpha_min=0.0), r"alpha_min must lie in \(0, 1\]"),
    (tiny(), replace(TINY, num_classes=10), "is unconditional, it has no classes: leave out --num-classes"),
    (tiny(num_classes=10), replace(TINY, num_classes=9), "has 11 rows .*--num-classes is 11 without .* or 10 with one"),
    (tiny(num_classes=1, null_label=False), replace(TINY, num_classes=0), "has 1 rows .*--num-classes is 1 without"),
    (tiny(), replace(TINY, vae="some/vae"), "makes pixels of 3 channels, not latents: leave out --vae"),
    (tiny(), replace(TINY, path="ddpm-linear"), "is a U-ViT, ddpm-linear is the path of a DiT"),
    (tiny_sit(), replace(TINY, num_classes=2), "has 4 rows .*--num-classes is 4 without .* or 3 with one"),
    (SKIPS, TINY, r"is a decayed SiT, whose weights do not determine alpha_min: give it with --alpha-min .*0\.8"),
    ({"model": tiny_sit()}, TINY, "has no entry 'ema', the ema weights: give --weights raw"),
    ({"model": tiny_sit(), "ema": {}}, TINY, "is no official U-ViT, SiT or MAE, it looks like .*, it holds nothing"),
    (
        {"ema": tiny_sit(), "args": Namespace(path_type="Cosine")},
        TINY,
        "was trained with path_type Cosine, which is not known here: give --path",
    ),
    (
        {"ema": SKIPS, "args": Namespace(min_sigma=0.8)},
        replace(TINY, alpha_min=0.7),
        r"was trained with min_sigma 0\.8, not with alpha_min 0\.7: leave out --alpha-min",
    ),
    ({"ema": SKIPS, "args": Namespace(min_sigma=None)}, TINY, "give it with --alpha-min"),
    (FULL, TINY_ENCODER, "a decoder of width 24, which is not published: .* give them with --decoder-heads"),
    (FULL, replace(TINY_MAE, decoder_heads=5), "dim 24 is not divisible by heads 5"),
    (FULL, replace(TINY_MAE, decoder_heads=0), "decoder_heads must be at least 1"),
    (mae("mask_token"), PLAIN, "a decoder of positions without skips sees no image"),
    (FULL, replace(TINY_MAE, path="vp"), "is a masked autoencoder: leave out --path, which it does not have"),
    (FULL, replace(TINY_MAE, num_classes=10), "is a masked autoencoder: leave out --num-classes"),
    (FULL, replace(TINY_MAE, vae="a/vae"), "is a masked autoencoder: leave out --vae"),
    (mae(**DECAYED), TINY_MAE, r"is a decayed masked autoencoder, whose weights do not .*--alpha-min .*0\.6.*0\.7"),
    (RECORDED, PLAIN, r"was trained with min_decay 0\.7, not with alpha_min 1: leave out --alpha-min"),
    ({**RECORDED, "args": Namespace(min_decay="low")}, TINY_MAE, "min_decay must be float, it is 'low'"),
    ({**RECORDED, "args": Namespace(norm_pix_loss=3)}, PLAIN, "norm_pix_loss must be bool"),
    (ENCODER, replace(TINY_ENCODER, norm_pix=False), "is a vision transformer: leave out --norm-pix"),
    (ENCODER, replace(TINY_ENCODER, num_classes=10), "has no classifier, not one of 10: leave out --num-classes"),
    (ENCODER, replace(TINY_ENCODER, prediction="eps"), "is a vision transformer: leave out --prediction"),
    (TUNED, replace(TINY_ENCODER, num_classes=10), "has a head of 5 classes, not one of 10: leave out --num-classes"),
    (TUNED, ImportOptions(), "no published size: .* with --heads"),
    ({"model": NO_NORM}, TINY_ENCODER, "is a decayed vision transformer, .*--alpha-min"),
]
FAMILIES = [
    (UVITS, TINY),
    (SITS, replace(TINY, alpha_min=1.0)),
    (MAES, PLAIN),
    (ENCODERS, TINY_ENCODER),
    (OTHERS, TINY),
]
MISFITS = [(contents, hints, f"official.pth.*{message}") for family, hints in FAMILIES for contents, message in family]


@pytest.mark.parametrize(("contents", "hints", "message"), MISFITS + HINTS)
def test_what_does_not_fit_is_refused_with_what_is_wrong(tmp_path, contents, hints, message):
    with pytest.raises(UserError, match=message):
        imported(contents, tmp_path, hints)
    assert not (tmp_path / "ours.safetensors").exists()


def test_recorded_alphas_must_be_those_that_are_said(tmp_path):
    nets = (
        UViT(**uvit_reference.SMALL, alpha_min=0.7),
        *(sit_reference.loaded(**o, alpha_min=0.7) for o in ({}, DECAYED)),
    )
    for state in (net.state_dict() for net in nets):
        with pytest.raises(UserError, match=r"alphas from 1 to 0\.7, not with alpha_min 1: give --alpha-min 0\.7"):
            imported(state, tmp_path)
        assert same(imported(state, tmp_path, replace(TINY, alpha_min=0.7)).net.state_dict(), state)
    ordinary = sit_reference.loaded(**DECAYED).state_dict()
    assert same(imported(ordinary, tmp_path).net.state_dict(), ordinary), "its alphas tell that they are 1"


def test_a_choice_that_is_none_is_one_line():
    with pytest.raises(UserError, match="--path must be linear or gvp or .*, it is 'nope'"):
        ImportOptions(path="nope")


@pytest.mark.parametrize(("kind", "options"), [(MAE, reference.SMALL), (ViT, reference.SMALL_VIT)])
def test_an_encoder_makes_no_images(tmp_path, kind, options):
    checkpoint = load(our_encoder(tmp_path, kind, **options))
    with pytest.raises(UserError, match="makes no images"):
        checkpoint.source(torch.device("cpu"))
