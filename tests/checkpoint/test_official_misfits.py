"""Files that resemble official ones, and options that do not fit: one line for each."""

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
PLAIN_SIT = replace(TINY, alpha_min=1.0)
DECAYED = dict(wiring="decayed")
zeros = torch.zeros


def mae(*without, wiring="official", **entries):
    state = change_state(reference.random_state(**reference.SMALL, wiring=wiring), *without, **entries)
    return {"model": state, "epoch": 3}


def encoder(*without, **entries):
    return change_state(reference.finetuned_file(**reference.SMALL)["model"], *without, **entries)


FULL, ENCODER = reference.full_file(**reference.SMALL), reference.pretrained_file(**reference.SMALL)
RECORDED = reference.decayed_file(**reference.SMALL, min_decay=0.7)
NO_NORM = change_state(reference.random_state(**reference.SMALL), "norm.", "decoder", "mask")
SKIPS = tiny_sit(**DECAYED)
HEAD = {"final_layer__linear__weight": zeros(24, 16), "final_layer__linear__bias": zeros(24)}
MISFITS = [  # contents of a file, options of its import, and what the line names
    (change_state(tiny(), "pos_embed"), TINY, "pos_embed"),
    (change_state(tiny(), norm3__bias=zeros(2)), TINY, ("norm3.bias", "U-ViT")),
    (change_state(tiny(), norm__bias=zeros(17)), TINY, ("norm.bias", "(17,)", "(16,)")),
    (change_state(tiny(), pos_embed=zeros(17, 16)), TINY, ("pos_embed", "(17, 16)")),
    (change_state(tiny(), pos_embed=zeros(1, 16, 16)), TINY, (15, "square")),
    (change_state(tiny(), norm__bias=[0.0]), TINY, ("norm.bias", "list")),
    (change_state(tiny(), alphas=torch.ones(3)), TINY, "give `alpha_min`"),
    (tiny() | {"in_blocks.1000000000.norm1.weight": zeros(16)}, TINY, ("depth", 1000)),
    (change_state(tiny_sit(), "blocks."), TINY, "blocks.0.mlp.fc1.weight"),
    (change_state(tiny_sit(), **HEAD), TINY, ("24 rows", "2x2x4", 16, 32)),
    (change_state(tiny_sit(), final_layer__linear__bias=zeros(17)), TINY, "final_layer.linear"),
    (mae("decoder_"), PLAIN, "decoder_embed.weight"),
    (mae(**DECAYED, skip__7__mask_token=zeros(1, 1, 16)), PLAIN, "skip.7.mask_token"),
    (mae(alphas=torch.full((8,), 0.5)), PLAIN, ("0.5", "alpha_min", 1, "`alpha_min`")),
    (encoder("head.", head__1__weight=zeros(5, 16)), TINY_ENCODER, "head.0.running_mean"),
    ({3: zeros(2), None: zeros(2)}, TINY, ""),
    (tiny(), ImportOptions(), ("width", 16, "depth", 4, "`heads`")),
    (tiny(), replace(TINY, num_classes=10), ("unconditional", "`num_classes`")),
    (tiny(num_classes=10), replace(TINY, num_classes=9), ("11 rows", "`num_classes`", 10)),
    (tiny(), replace(TINY, vae="some/vae"), ("channels", 3, "`vae`")),
    (tiny(), replace(TINY, path="ddpm-linear"), ("U-ViT", "ddpm-linear", "DiT")),
    (SKIPS, TINY, ("SiT", "`alpha_min`", "0.8")),
    ({"model": tiny_sit(), "ema": {}}, TINY, ("U-ViT", "SiT", "MAE", "nothing")),
    ({"ema": tiny_sit(), "args": Namespace(path_type="Cosine")}, TINY, ("path_type Cosine", "`path`")),
    (FULL, TINY_ENCODER, (24, "`decoder_heads`")),
    (mae("mask_token"), PLAIN, ("decoder", "skips")),
    (FULL, replace(TINY_MAE, path="vp"), ("masked autoencoder", "`path`")),
    (mae(**DECAYED), TINY_MAE, ("masked autoencoder", "`alpha_min`", "0.6", "0.7")),
    (RECORDED, PLAIN, ("min_decay 0.7", "alpha_min 1", "`alpha_min`")),
    ({**RECORDED, "args": Namespace(min_decay="low")}, TINY_MAE, ("min_decay", "float", "'low'")),
    (ENCODER, replace(TINY_ENCODER, num_classes=10), ("classifier", 10, "`num_classes`")),
    ({"model": NO_NORM}, TINY_ENCODER, ("vision transformer", "`alpha_min`")),
]


@pytest.mark.parametrize(("contents", "hints", "message"), MISFITS)
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


@pytest.mark.parametrize(("kind", "options"), [(MAE, reference.SMALL), (ViT, reference.SMALL_VIT)])
def test_an_encoder_makes_no_images(tmp_path, kind, options):
    checkpoint = load(our_encoder(tmp_path, kind, **options))
    with raises_user_error("images"):
        checkpoint.source(torch.device("cpu"))
