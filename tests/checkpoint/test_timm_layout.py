"""Encoders written for timm: the lines of Python that an export prints build the same function there."""

import pytest
import timm
import torch
from mae_reference import SMALL, SMALL_VIT, STD, inputs, standardise
from official_files import TINY_ENCODER, import_and_load, our_encoder, ours
from refusals import raises_user_error
from safetensors.torch import load_file

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.convert import export_file
from uvit_decay.checkpoint.official.mae import LICENCE
from uvit_decay.commands.convert import main
from uvit_decay.nn import MAE, ViT

DECAYED = dict(wiring="decayed", alpha_min=0.6)
CASES = {
    "official": (MAE, SMALL),
    "decayed": (MAE, SMALL | DECAYED),
    "cosine-mlp": (MAE, SMALL | DECAYED | dict(schedule="cosine", branches="mlp")),
    "block-v2": (MAE, SMALL | DECAYED | dict(granularity="block", index="v2")),
    "patch-4": (MAE, SMALL | dict(patch_size=4, channels=1, pixels="unit")),
    "encoder-without-norm": (ViT, SMALL_VIT | dict(norm=False, alpha_min=0.7, mlp_ratio=2.0)),
    "probe": (ViT, SMALL_VIT | dict(num_classes=5, batch_norm=True, norm=False, alpha_min=0.7)),
    "rms": (ViT, SMALL_VIT | dict(num_classes=5, norm_type="rms", alpha_min=0.7)),
    "qk-norm-rms": (MAE, SMALL | DECAYED | dict(qk_norm=True, norm_type="rms")),
    "probe-of-means": (ViT, SMALL_VIT | dict(num_classes=5, batch_norm=True, pool="mean")),
}


def built(note):
    """Return the model of the lines of Python in the note of an export."""
    words, *lines = note.splitlines()
    assert words.startswith("for images ")
    names = {}
    exec("\n".join(line for line in lines if line != LICENCE), names)
    return names["model"].eval()


def expected(net, x):
    """Return the output of timm's model: logits, or the normed token or mean of an encoder."""
    if net.num_classes:
        return net(x)
    if isinstance(net, ViT):
        return net.pooled(x)
    *_, last = net.forward_intermediates(x)
    return (net.norm(last) if net.config["norm"] else last)[:, 0]


@pytest.mark.parametrize(("kind", "options"), CASES.values(), ids=CASES)
def test_the_printed_lines_give_the_same_function_in_timm(tmp_path, kind, options):
    path = our_encoder(tmp_path, kind, **options)
    net = load(path).net.double()
    model = built(export_file(path, tmp_path / "timm.pth", to="timm")).double()
    x = inputs(**options)[0].double()
    scaled = standardise(x) if net.config["pixels"] == "imagenet" else x
    with torch.no_grad():
        assert torch.allclose(model(scaled), expected(net, x), rtol=0, atol=1e-6)
    std = timm.data.resolve_model_data_config(model)["std"]
    assert std == (STD if net.config["pixels"] == "imagenet" else (0.5, 0.5, 0.5))


def test_gradients_of_the_decayed_encoder_are_the_same_in_timm(tmp_path):
    path = our_encoder(tmp_path, MAE, **SMALL | DECAYED)
    net, model = load(path).net, built(export_file(path, tmp_path / "timm.safetensors", to="timm"))
    x, _ = inputs(**SMALL)
    expected(net, x).square().sum().backward()
    model(standardise(x)).square().sum().backward()
    for name, parameter in model.named_parameters():
        theirs = dict(net.named_parameters())[name].grad if name != "pos_embed" else parameter.grad
        assert torch.allclose(parameter.grad, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max())), name


def test_the_command_line_names_the_decay_and_the_licence(tmp_path, capsys):
    path, target = our_encoder(tmp_path, MAE, **SMALL | DECAYED), tmp_path / "timm.safetensors"
    main(["export", str(path), str(target), "--to", "timm"])
    *_, attach, licence, wrote = capsys.readouterr().out.splitlines()
    assert attach == "decay.attach(model, alpha_min=0.6)"
    assert licence == LICENCE, "its card says that it was imported"
    assert wrote.startswith("wrote ")
    assert not any(name.startswith(("decoder", "mask", "skip", "alphas")) for name in load_file(target))


def test_what_timm_cannot_express_is_refused_in_one_line(tmp_path):
    target = tmp_path / "timm.pth"
    learned = our_encoder(tmp_path, ViT, **SMALL_VIT, schedule="learnable")
    with raises_user_error("learnable", "timm"):
        export_file(learned, target, to="timm")
    with raises_user_error("UViT", "timm", "`to`"):
        export_file(ours(tmp_path), target, to="timm")
    assert not target.exists()


def test_a_vision_transformer_of_timm_is_imported(tmp_path):
    model = timm.create_model("vit_base_patch16_224.mae", img_size=8, patch_size=2, embed_dim=16, depth=4, num_heads=2)
    x, _ = inputs(**SMALL)
    net = import_and_load(model.state_dict(), tmp_path, TINY_ENCODER).net
    with torch.no_grad():
        assert torch.allclose(net.pooled(x), model.eval()(standardise(x)), atol=1e-5)
