"""MAE files from ours and back: nothing is lost without a word."""

from dataclasses import replace

import mae_reference as reference
import pytest
import torch
from conftest import same
from mae_reference import SMALL
from official_files import TINY_ENCODER, TINY_MAE, imported, our_encoder, unrecorded

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.convert import export_file, import_official
from uvit_decay.checkpoint.official.mae import LICENCE
from uvit_decay.nn import MAE, ViT


@pytest.mark.parametrize(
    ("file", "hints", "lost"),
    [
        (reference.pretrained_file, TINY_ENCODER, "heads 2"),
        (reference.finetuned_file, TINY_ENCODER, "heads 2"),
        (reference.probed_file, TINY_ENCODER, "heads 2"),
        (reference.full_file, TINY_MAE, "heads 2, decoder_heads 3"),
        (reference.full_file, replace(TINY_MAE, norm_pix=False), "heads 2, decoder_heads 3, norm_pix False"),
        (reference.decayed_file, replace(TINY_MAE, alpha_min=1.0), "heads 2, decoder_heads 3, alpha_min 1.0"),
        (reference.decayed_file, replace(TINY_MAE, alpha_min=0.6), "heads 2, decoder_heads 3, alpha_min 0.6"),
    ],
)
def test_official_to_ours_to_official_is_equal(tmp_path, file, hints, lost):
    contents = file(**SMALL)
    imported(contents, tmp_path, hints)
    note = export_file(tmp_path / "ours.safetensors", tmp_path / "back.pth")
    assert note.splitlines() == [unrecorded(lost), LICENCE]
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert list(back) == ["model"]
    assert same(back["model"], contents["model"])


SIZE = {name: value for name, value in SMALL.items() if not name.startswith("decoder")}
OURS = {
    "official": (MAE, SMALL),
    "decayed": (MAE, SMALL | dict(wiring="decayed", alpha_min=0.7)),
    "latent-and-skips": (MAE, SMALL | dict(wiring="decayed", decoder_input="latent", alpha_min=0.7)),
    "no-skips": (MAE, SMALL | dict(wiring="decayed", decoder_input="latent", skips=False, alpha_min=0.7)),
    "narrow": (MAE, SMALL | dict(mlp_ratio=2.0, patch_size=4)),
    "encoder": (ViT, SIZE),
    "encoder-without-norm": (ViT, SIZE | dict(norm=False, alpha_min=0.7)),
    "classifier": (ViT, SIZE | dict(num_classes=3, pool="mean", alpha_min=0.7)),
    "probe": (ViT, SIZE | dict(num_classes=3, batch_norm=True)),
    "probe-of-means": (ViT, SIZE | dict(num_classes=3, pool="mean", batch_norm=True)),
}


@pytest.mark.parametrize(("kind", "options"), OURS.values(), ids=OURS)
def test_ours_to_official_to_ours_is_equal(tmp_path, kind, options):
    ours, official, back = (tmp_path / name for name in ("ours.safetensors", "official.pth", "back.safetensors"))
    net = load(our_encoder(tmp_path, kind, **options)).net
    note = export_file(ours, official)
    assert ("alpha_min 0.7" in note) == ("alpha_min" in options)
    hints = TINY_MAE if kind is MAE else TINY_ENCODER
    import_official(official, back, None, replace(hints, alpha_min=options.get("alpha_min")))
    again = load(back).net
    assert same(again.state_dict(), net.state_dict())
    preset = {"wiring", "zero_init"}
    assert {name: value for name, value in again.config.items() if name not in preset} == {
        name: value for name, value in net.config.items() if name not in preset
    }


def test_what_an_import_would_guess_wrong_is_named_where_it_is_lost(tmp_path):
    path = our_encoder(tmp_path, MAE, **SMALL, alpha_min=0.6, branches="mlp", norm_pix=False, pixels="unit")
    lost = "heads 2, decoder_heads 3, norm_pix False, pixels unit, alpha_min 0.6, branches mlp"
    assert export_file(path, tmp_path / "official.pth").splitlines()[0] == unrecorded(lost)


def test_the_authors_layout_is_whole_for_their_strict_loader(tmp_path):
    layout = SMALL | dict(depth=8)
    path = our_encoder(tmp_path, MAE, **layout, wiring="decayed", alpha_min=0.7)
    export_file(path, tmp_path / "official.pth")
    state = torch.load(tmp_path / "official.pth", weights_only=True)["model"]
    assert {name: tuple(value.shape) for name, value in state.items()} == reference.mae_shapes("decayed", **layout)
