"""MAE files of the official code and of the decay's authors: recognised, imported as the same function, exported."""

import math
from dataclasses import replace
from pathlib import Path

import mae_reference as reference
import pytest
import torch
from conftest import same
from mae_reference import BASE, SMALL, SMALL_VIT, inputs, standardise
from official_files import HERE, TINY_ENCODER, TINY_MAE, import_and_load, meta, our_encoder, save_contents
from refusals import find_line

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.convert import export_file, import_official, recognise
from uvit_decay.checkpoint.official.mae import LICENCE
from uvit_decay.checkpoint.options import ImportOptions
from uvit_decay.nn import MAE, ViT
from uvit_decay.nn.sizes import VIT_SIZES

LARGE, HUGE = BASE | VIT_SIZES["l"], BASE | VIT_SIZES["h"] | dict(patch_size=14)
PUBLISHED = [
    # size, layout, wiring, tensors and parameters of the file, SkipLayers that nothing reads, parameters of each
    ("mae-b/16", BASE, "official", 254, 111_907_840, 0, 0),
    ("mae-b/16", BASE, "decayed", 282, 117_291_008, 0, 0),
    ("mae-l/16", LARGE, "official", 398, 329_541_888, 0, 0),
    ("mae-l/16", LARGE, "decayed", 456, 341_885_184, 4, 1_050_624),
    ("mae-h/14", HUGE, "official", 494, 657_074_508, 0, 0),
    ("mae-h/14", HUGE, "decayed", 572, 675_589_964, 8, 1_181_952),
    ("mae-768x18/16", BASE | VIT_SIZES["768x18"], "decayed", 369, 162_576_128, 1, 919_296),
]
ALPHAS = torch.linspace(1, 0.6, 8).tolist()


def expected(contents, alphas=None):
    """Return prediction and mask of the file's weights at our inputs."""
    x, noise = inputs(**SMALL)
    return reference.mae_forward(contents["model"], standardise(x), noise, alphas=alphas, **SMALL)


def difference(net, contents, alphas=None):
    """Return the largest difference between the network and the file's weights, in prediction or mask."""
    with torch.no_grad():
        pairs = zip(net(*inputs(**SMALL)), expected(contents, alphas), strict=True)
        return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize(("name", "layout", "wiring", "tensors", "count", "unread", "each"), PUBLISHED)
def test_published_files_are_recognised(name, layout, wiring, tensors, count, unread, each):
    shapes = reference.mae_shapes(wiring, **layout)
    assert (len(shapes), sum(map(math.prod, shapes.values()))) == (tensors, count)
    model = recognise(meta(shapes), ImportOptions(alpha_min=0.6), HERE)
    config = layout | dict(wiring=wiring, norm_pix=True, alpha_min=0.6, pixels="imagenet")
    assert model.net.config.items() >= config.items()
    assert f"{name} ({layout['heads']} heads, {count - unread * each:,} parameters)" in model.summary()
    assert model.notes[-1] == LICENCE
    assert len(model.notes) == 1 + (unread > 0)
    assert all(f"skip.{layout['depth'] // 2 - 1 - j}" in model.notes[0] for j in range(unread))


@pytest.mark.parametrize(("size", "count"), [("b", 86_567_656), ("h", 632_045_800)])
def test_fine_tuned_files_of_published_sizes_need_no_word(size, count):
    layout = BASE | VIT_SIZES[size] | dict(patch_size=14 if size == "h" else 16)
    model = recognise(meta(reference.encoder_shapes(norm="fc_norm", num_classes=1000, **layout)), ImportOptions(), HERE)
    assert f"vit-{size}/{layout['patch_size']} ({layout['heads']} heads, {count:,} parameters)" in model.summary()
    assert "num_classes 1000" in model.summary()


@pytest.mark.parametrize(
    ("name", "said", "norm_pix"),
    [
        ("mae_pretrain_vit_base_full.pth", None, True),
        ("mae_visualize_vit_base.pth", None, False),
        ("mae_visualize_vit_base.pth", True, True),
    ],
)
def test_targets_are_told_by_the_name_of_a_released_file_or_said(name, said, norm_pix):
    model = recognise(reference.random_state(**SMALL), replace(TINY_MAE, norm_pix=said), Path(name))
    assert model.net.config["norm_pix"] is norm_pix


def test_prediction_and_loss_at_the_published_widths_are_the_published_ones():
    layout = BASE | dict(depth=2, decoder_depth=2)
    state = reference.random_state(**layout, wiring="decayed")
    model = recognise(state, ImportOptions(heads=12, alpha_min=0.6), HERE)
    model.net.load_state_dict(model.state, assign=True)
    x, noise = inputs(**layout, count=1)
    with torch.no_grad():
        prediction, mask = model.net(x, noise)
        alphas = torch.linspace(1, 0.6, 4).tolist()
        theirs, their_mask = reference.mae_forward(state, standardise(x), noise, alphas=alphas, **layout)
    assert mask.sum() == 147
    assert torch.equal(mask, their_mask)
    assert torch.allclose(prediction, theirs, rtol=1e-5, atol=1e-5)
    expected = reference.loss(standardise(x), theirs, mask, 16).item()
    assert model.net.reconstruction_loss(x, prediction, mask).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("norm_pix", [True, False])
def test_an_imported_mae_is_the_published_function(tmp_path, norm_pix):
    contents = reference.full_file(**SMALL)
    checkpoint = import_and_load(contents, tmp_path, replace(TINY_MAE, norm_pix=norm_pix))
    assert difference(checkpoint.net, contents) < 1e-5
    x, noise = inputs(**SMALL)
    prediction, mask = expected(contents)
    theirs = reference.loss(standardise(x), prediction, mask, SMALL["patch_size"], norm_pix)
    assert checkpoint.net.reconstruction_loss(x, prediction, mask).item() == pytest.approx(theirs.item(), abs=1e-5)
    assert (checkpoint.card.weights, checkpoint.path, checkpoint.card.class_names) == ("raw", None, ())


def test_a_file_of_the_authors_is_imported_with_the_alpha_min_that_it_records(tmp_path):
    contents = reference.decayed_file(**SMALL, min_decay=0.6)
    net = import_and_load(contents, tmp_path, TINY_MAE).net
    assert (net.config["alpha_min"], net.config["wiring"], net.config["norm_pix"]) == (0.6, "decayed", True)
    assert difference(net, contents, ALPHAS) < 1e-5 < difference(net, contents)
    said = import_and_load(reference.decayed_file(**SMALL), tmp_path, replace(TINY_MAE, alpha_min=0.6)).net
    assert same(said.state_dict(), net.state_dict())
    contents["args"].norm_pix_loss = False
    assert import_and_load(contents, tmp_path, TINY_MAE).net.config["norm_pix"] is False


def test_skip_layers_that_nothing_reads_are_left_out_and_said(tmp_path):
    layout = SMALL | dict(depth=8)
    contents = reference.decayed_file(**layout, min_decay=1.0)
    path = save_contents(contents, tmp_path / "official.pth")
    note = import_official(path, tmp_path / "ours.safetensors", None, TINY_MAE)
    find_line(note, "skip.3")
    net = load(tmp_path / "ours.safetensors").net
    assert len(net.skip) == 3
    x, noise = inputs(**SMALL)
    prediction, _ = reference.mae_forward(contents["model"], standardise(x), noise, **layout)
    assert torch.allclose(net(x, noise)[0], prediction, atol=1e-5)


@pytest.mark.parametrize("file", [reference.finetuned_file, reference.probed_file])
def test_an_imported_classifier_is_the_published_function(tmp_path, file):
    contents, (x, _) = file(**SMALL), inputs(**SMALL)
    checkpoint = import_and_load(contents, tmp_path, TINY_ENCODER)
    assert torch.allclose(checkpoint.net(x), reference.logits(contents["model"], standardise(x), 2), atol=1e-5)
    assert checkpoint.card.class_names == tuple("01234")


def test_a_network_of_other_channels_computes_in_their_own_scale(tmp_path):
    layout = SMALL | dict(channels=1)
    contents = reference.full_file(**layout)
    net = import_and_load(contents, tmp_path, TINY_MAE).net
    x, noise = inputs(**layout)
    assert net.config["pixels"] == "unit"
    assert torch.allclose(net(x, noise)[0], reference.mae_forward(contents["model"], x, noise, **SMALL)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("file", "hints"),
    [
        (reference.pretrained_file, TINY_ENCODER),
        (reference.finetuned_file, TINY_ENCODER),
        (reference.probed_file, TINY_ENCODER),
        (reference.full_file, TINY_MAE),
        (reference.full_file, replace(TINY_MAE, norm_pix=False)),
        (reference.decayed_file, replace(TINY_MAE, alpha_min=0.6)),
    ],
)
def test_official_to_ours_to_official_is_equal(tmp_path, file, hints):
    contents = file(**SMALL)
    import_and_load(contents, tmp_path, hints)
    note = export_file(tmp_path / "ours.safetensors", tmp_path / "back.pth")
    find_line(note, "official", ".safetensors")
    assert note.splitlines()[-1] == LICENCE
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert list(back) == ["model"]
    assert same(back["model"], contents["model"])


OURS = {
    "official": (MAE, SMALL),
    "decayed": (MAE, SMALL | dict(wiring="decayed", alpha_min=0.7)),
    "latent-and-skips": (MAE, SMALL | dict(wiring="decayed", decoder_input="latent", alpha_min=0.7)),
    "no-skips": (MAE, SMALL | dict(wiring="decayed", decoder_input="latent", skips=False, alpha_min=0.7)),
    "narrow": (MAE, SMALL | dict(mlp_ratio=2.0, patch_size=4)),
    "encoder": (ViT, SMALL_VIT),
    "encoder-without-norm": (ViT, SMALL_VIT | dict(norm=False, alpha_min=0.7)),
    "classifier": (ViT, SMALL_VIT | dict(num_classes=3, pool="mean", alpha_min=0.7)),
    "probe": (ViT, SMALL_VIT | dict(num_classes=3, batch_norm=True)),
    "probe-of-means": (ViT, SMALL_VIT | dict(num_classes=3, pool="mean", batch_norm=True)),
}


@pytest.mark.parametrize(("kind", "options"), OURS.values(), ids=OURS)
def test_ours_to_official_to_ours_is_equal(tmp_path, kind, options):
    ours, official, back = (tmp_path / name for name in ("ours.safetensors", "official.pth", "back.safetensors"))
    net = load(our_encoder(tmp_path, kind, **options)).net
    export_file(ours, official)
    hints = TINY_MAE if kind is MAE else TINY_ENCODER
    import_official(official, back, None, replace(hints, alpha_min=options.get("alpha_min")))
    again = load(back).net
    assert same(again.state_dict(), net.state_dict())
    preset = {"wiring", "zero_init"}
    assert {name: value for name, value in again.config.items() if name not in preset} == {
        name: value for name, value in net.config.items() if name not in preset
    }


def test_the_authors_layout_is_whole_for_their_strict_loader(tmp_path):
    layout = SMALL | dict(depth=8)
    path = our_encoder(tmp_path, MAE, **layout, wiring="decayed", alpha_min=0.7)
    export_file(path, tmp_path / "official.pth")
    state = torch.load(tmp_path / "official.pth", weights_only=True)["model"]
    assert {name: tuple(value.shape) for name, value in state.items()} == reference.mae_shapes("decayed", **layout)
