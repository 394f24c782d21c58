"""Files that resemble official ones, hostile files, and options that do not fit: one line for each."""

import functools
from argparse import Namespace
from dataclasses import replace

import mae_reference as reference
import pytest
import sit_reference
import torch
import uvit_reference
from conftest import same
from official_files import TINY, TINY_ENCODER, TINY_MAE, change_state, import_and_load, our_encoder, tiny, tiny_sit
from refusals import raises_user_error

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.options import ImportOptions
from uvit_decay.nn import MAE, UViT, ViT

PLAIN = replace(TINY_MAE, alpha_min=1.0)
DECAYED = dict(wiring="decayed")
zeros = torch.zeros


def mae(*without, wiring="official", **entries):
    state = change_state(reference.random_state(**reference.SMALL, wiring=wiring), *without, **entries)
    return {"model": state, "epoch": 3}


def encoder(*without, **entries):
    return change_state(reference.finetuned_file(**reference.SMALL)["model"], *without, **entries)


UVITS = [
    (change_state(tiny(), "norm.bias"), "norm.bias"),
    (change_state(tiny(), "pos_embed"), "pos_embed"),
    (change_state(tiny(), "in_blocks.1."), "in_blocks.1.norm1.weight"),
    (change_state(tiny(), norm3__bias=zeros(2)), ("norm3.bias", "U-ViT")),
    (change_state(tiny(), norm__bias=zeros(17)), ("norm.bias", "(17,)", "(16,)")),
    (change_state(tiny(), pos_embed=zeros(17, 16)), ("pos_embed", "(17, 16)")),
    (change_state(tiny(), patch_embed__proj__weight=zeros(0, 3, 2, 2)), "(0, 3, 2, 2)"),
    (change_state(tiny(), pos_embed=zeros(1, 16, 16)), (15, "square")),
    (change_state(tiny(), norm__bias=[0.0]), ("norm.bias", "list")),
    (change_state(tiny(), module__norm__bias=zeros(16)), ("norm.bias", "module.norm.bias")),
    (change_state(tiny(), alphas=zeros(0)), ("alphas", "(0,)")),
    (change_state(tiny(), alphas=torch.ones(10, dtype=torch.int64)), ("alphas", "torch.int64")),
    (change_state(tiny(), alphas=torch.ones(3)), "give `alpha_min`"),
    (change_state(tiny(), pos_embed=zeros(1).expand(1, 10**10 + 1, 16)), "pos_embed"),
]
SITS = [
    (change_state(tiny_sit(), "final_layer.linear.weight"), "final_layer.linear.weight"),
    (change_state(tiny_sit(), "blocks."), "blocks.0.mlp.fc1.weight"),
    (change_state(tiny_sit(**DECAYED), "dec_blocks."), "dec_blocks.0.skip.weight"),
    (change_state(tiny_sit(**DECAYED), "dec_blocks.1.skip.bias"), "dec_blocks.1.skip.bias"),
    (tiny_sit() | tiny_sit(**DECAYED), ("SiT", "blocks")),
    (change_state(tiny_sit(), t_embedder__mlp__2__bias=zeros(9)), ("t_embedder.mlp.2.bias", "(9,)")),
    (
        change_state(tiny_sit(), final_layer__linear__weight=zeros(24, 16), final_layer__linear__bias=zeros(24)),
        ("24 rows", "2x2x4", 16, 32),
    ),
    (change_state(tiny_sit(), final_layer__linear__bias=zeros(17)), "final_layer.linear"),
    (change_state(tiny_sit(), y_embedder__embedding_table__weight=zeros(4, 17)), "(4, 17)"),
]
MAES = [
    (mae("decoder_"), "decoder_embed.weight"),
    (mae("decoder_blocks."), "decoder_blocks.0.norm1"),
    (mae("decoder_blocks.1."), "decoder_blocks.1.norm1"),
    (mae("skip.1.", **DECAYED), "skip.1.mask_token"),
    (mae("skip.1.fc", **DECAYED), "skip.1.fc.0"),
    (mae(**DECAYED, skip__7__mask_token=zeros(1, 1, 16)), "skip.7.mask_token"),
    (mae(decoder_cls_token=zeros(1, 1, 24)), "decoder_cls_token"),
    (mae(decoder_embed__weight=zeros(24)), ("decoder_embed.weight", "(24,)")),
    (mae(decoder_pos_embed=zeros(1, 16, 24)), ("decoder_pos_embed", "(1, 16, 24)")),
    (mae(patch_embed__proj__weight=zeros(16, 3, 4, 2)), "(16, 3, 4, 2)"),
    (mae(mask_token=zeros(1, 1, 24, dtype=torch.int64)), ("mask_token", "torch.int64")),
    (mae(alphas=torch.full((8,), 0.5)), ("0.5", "alpha_min", 1, "`alpha_min`")),
    (mae(decoder_blocks__1000000000__norm1__bias=zeros(24)), "decoder_blocks.1000000000.norm1.bias"),
]
ENCODERS = [
    (encoder("head.bias"), "head.bias"),
    (encoder(norm__bias=zeros(16)), ("norm.bias", "vision transformer")),
    (encoder(head__weight=zeros(5, 17)), ("head.weight", "(5, 17)", "(5, 16)")),
    (encoder("head.", head__1__weight=zeros(5, 16)), "head.0.running_mean"),
]
OTHERS = [
    ({3: zeros(2), None: zeros(2)}, ""),
    ({"a\nb": zeros(2)}, "a b"),
    (functools.reduce(lambda inner, _: dict.fromkeys(map(str, range(1000)), inner), range(4), zeros(1)), ""),
    ({"ema": tiny_sit(), "args": {"min_sigma": 10**400}}, "min_sigma"),
    *(
        (state | {f"{blocks}.{number}.norm1.weight": zeros(16)}, blocks)
        for state, blocks in ((tiny(), "in_blocks"), (tiny_sit(), "blocks"))
        for number in ("1000000000", "9" * 5000, "40")
    ),
]
FULL, ENCODER, TUNED = (
    kind(**reference.SMALL) for kind in (reference.full_file, reference.pretrained_file, reference.finetuned_file)
)
RECORDED = reference.decayed_file(**reference.SMALL, min_decay=0.7)
NO_NORM = change_state(reference.random_state(**reference.SMALL), "norm.", "decoder", "mask")
SKIPS = tiny_sit(**DECAYED)
HINTS = [
    (tiny(), ImportOptions(), ("width", 16, "depth", 4, "`heads`")),
    (tiny(), ImportOptions(heads=3), ("dim", 16, "heads", 3)),
    (tiny(), ImportOptions(heads=0), ("heads", 1)),
    (tiny(), replace(TINY, alpha_min=0.0), ("alpha_min", "(0, 1]")),
    (tiny(), replace(TINY, num_classes=10), ("unconditional", "`num_classes`")),
    (tiny(num_classes=10), replace(TINY, num_classes=9), ("11 rows", "`num_classes`", 10)),
    (tiny(num_classes=1, null_label=False), replace(TINY, num_classes=0), ("1 rows", "`num_classes`")),
    (tiny(), replace(TINY, vae="some/vae"), ("channels", 3, "`vae`")),
    (tiny(), replace(TINY, path="ddpm-linear"), ("U-ViT", "ddpm-linear", "DiT")),
    (tiny_sit(), replace(TINY, num_classes=2), ("4 rows", "`num_classes`", 3)),
    (SKIPS, TINY, ("SiT", "`alpha_min`", "0.8")),
    ({"model": tiny_sit(), "ema": {}}, TINY, ("U-ViT", "SiT", "MAE", "nothing")),
    (
        {"ema": tiny_sit(), "args": Namespace(path_type="Cosine")},
        TINY,
        ("path_type Cosine", "`path`"),
    ),
    (
        {"ema": SKIPS, "args": Namespace(min_sigma=0.8)},
        replace(TINY, alpha_min=0.7),
        ("min_sigma 0.8", "alpha_min 0.7", "`alpha_min`"),
    ),
    ({"ema": SKIPS, "args": Namespace(min_sigma=None)}, TINY, "`alpha_min`"),
    (FULL, TINY_ENCODER, (24, "`decoder_heads`")),
    (FULL, replace(TINY_MAE, decoder_heads=5), ("dim", 24, "heads", 5)),
    (FULL, replace(TINY_MAE, decoder_heads=0), ("decoder_heads", 1)),
    (mae("mask_token"), PLAIN, ("decoder", "skips")),
    (FULL, replace(TINY_MAE, path="vp"), ("masked autoencoder", "`path`")),
    (FULL, replace(TINY_MAE, num_classes=10), ("masked autoencoder", "`num_classes`")),
    (FULL, replace(TINY_MAE, vae="a/vae"), ("masked autoencoder", "`vae`")),
    (mae(**DECAYED), TINY_MAE, ("masked autoencoder", "`alpha_min`", "0.6", "0.7")),
    (RECORDED, PLAIN, ("min_decay 0.7", "alpha_min 1", "`alpha_min`")),
    ({**RECORDED, "args": Namespace(min_decay="low")}, TINY_MAE, ("min_decay", "float", "'low'")),
    ({**RECORDED, "args": Namespace(norm_pix_loss=3)}, PLAIN, ("norm_pix_loss", "bool")),
    (ENCODER, replace(TINY_ENCODER, norm_pix=False), ("vision transformer", "`norm_pix`")),
    (ENCODER, replace(TINY_ENCODER, num_classes=10), ("classifier", 10, "`num_classes`")),
    (ENCODER, replace(TINY_ENCODER, prediction="eps"), ("vision transformer", "`prediction`")),
    (TUNED, replace(TINY_ENCODER, num_classes=10), ("5 classes", 10, "`num_classes`")),
    (TUNED, ImportOptions(), ("size", "`heads`")),
    ({"model": NO_NORM}, TINY_ENCODER, ("vision transformer", "`alpha_min`")),
]
FAMILIES = [
    (UVITS, TINY),
    (SITS, replace(TINY, alpha_min=1.0)),
    (MAES, PLAIN),
    (ENCODERS, TINY_ENCODER),
    (OTHERS, TINY),
]
MISFITS = [(contents, hints, ("official.pth", message)) for family, hints in FAMILIES for contents, message in family]


@pytest.mark.parametrize(("contents", "hints", "message"), MISFITS + HINTS)
def test_what_does_not_fit_is_refused_with_what_is_wrong(tmp_path, contents, hints, message):
    with raises_user_error(message):
        import_and_load(contents, tmp_path, hints)
    assert not (tmp_path / "ours.safetensors").exists()


def test_recorded_alphas_must_be_those_that_are_said(tmp_path):
    nets = (
        UViT(**uvit_reference.SMALL, alpha_min=0.7),
        *(sit_reference.loaded(**o, alpha_min=0.7) for o in ({}, DECAYED)),
    )
    for state in (net.state_dict() for net in nets):
        with raises_user_error("1 to 0.7", "alpha_min 1", "`alpha_min` 0.7"):
            import_and_load(state, tmp_path)
        assert same(import_and_load(state, tmp_path, replace(TINY, alpha_min=0.7)).net.state_dict(), state)
    ordinary = sit_reference.loaded(**DECAYED).state_dict()
    assert same(import_and_load(ordinary, tmp_path).net.state_dict(), ordinary), "its alphas tell that they are 1"


def test_a_choice_that_is_none_is_one_line():
    with raises_user_error("`path`", "linear", "gvp", "nope"):
        ImportOptions(path="nope")


@pytest.mark.parametrize(("kind", "options"), [(MAE, reference.SMALL), (ViT, reference.SMALL_VIT)])
def test_an_encoder_makes_no_images(tmp_path, kind, options):
    checkpoint = load(our_encoder(tmp_path, kind, **options))
    with raises_user_error("images"):
        checkpoint.source(torch.device("cpu"))
