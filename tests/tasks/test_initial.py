"""Classifiers that start from an encoder: its weights by name, positions of another size, refusals."""

import json

import pytest
import torch
from refusals import find_line, raises_user_error
from runs import fit
from small_mae import mae_task
from small_vit import fine_tuning, linear_probe, small_vit

from uvit_decay.checkpoint import ModelCard, load
from uvit_decay.checkpoint.convert import export_file
from uvit_decay.checkpoint.detect import KEY
from uvit_decay.data import Digits
from uvit_decay.files.instantiate import Spec
from uvit_decay.files.tensor_files import save_tensors
from uvit_decay.nn import ResNet, ViT
from uvit_decay.nn.embed import resize_positions
from uvit_decay.tasks import ClassifyTask
from uvit_decay.tasks.init_from import adapt, read_initial


def start_from(net, file):
    """Let a classifier start from the weights of a file; return what is said."""
    function, data = ClassifyTask(net).function_spec(), Digits()
    data.setup()
    return "\n".join(adapt(net, read_initial(file, net, function), function, data))


@pytest.fixture(scope="module")
def mae(tmp_path_factory):
    """Return a .ckpt of an MAE of the authors' wiring, after two steps."""
    folder = tmp_path_factory.mktemp("mae")
    task = mae_task()
    fit(folder, max_steps=2, task=task)
    return folder / "checkpoints" / "last.ckpt", task.net.eval()


def test_the_encoder_is_that_of_the_file_and_one_line_says_so(mae, tmp_path):
    path, _ = mae
    export_file(path, tmp_path / "mae.safetensors", "raw")
    x = torch.rand(2, 1, 8, 8)
    for file, weights in ((path, "ema"), (tmp_path / "mae.safetensors", "raw")):
        net = small_vit(batch_norm=True, norm=True)
        torch.nn.init.ones_(net.patch_embed.proj.weight)
        line = start_from(net, file)
        find_line(line, file, "MAE", weights, "step 2", "new: norm.weight, norm.bias, head.0")
        assert "left out: decoder_blocks, decoder_cls_token, decoder_embed" in line
        encoder = mae[1] if weights == "raw" else load(path, "ema").net
        for ours, theirs in zip(net.forward_intermediates(x), encoder.forward_intermediates(x), strict=True):
            assert torch.equal(ours, theirs)


def test_the_classifier_of_a_fine_tuned_encoder_starts_almost_at_zero(mae):
    head = fine_tuning(init_from=str(mae[0])).net.head
    assert float(head.weight.detach().std()) == pytest.approx(2e-5, rel=0.2)
    assert not head.bias.detach().any()
    assert float(fine_tuning().net.head.weight.detach().std()) > 0.1  # from scratch
    probes = [linear_probe(seed=seed).net.head[1].weight.detach() for seed in (0, 0, 1)]
    assert float(probes[0].std()) == pytest.approx(0.01, rel=0.2)
    assert [torch.equal(probes[0], other) for other in probes[1:]] == [True, False]


@pytest.mark.parametrize("size", [4, 16])
def test_positions_of_another_size_are_interpolated_as_published(mae, size):
    from timm.layers import resample_abs_pos_embed

    net = small_vit(image_size=size)
    start_from(net, mae[0])
    before = mae[1].pos_embed
    expected = resample_abs_pos_embed(before, [size // 2] * 2, num_prefix_tokens=1, antialias=False)
    torch.testing.assert_close(net.pos_embed.detach(), expected, rtol=0, atol=1e-6)
    assert torch.equal(resize_positions(before, 1, 4), before)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: small_vit(alpha_min=1.0), ("net.alpha_min 0.7", "1.0", "`model.net.alpha_min` 0.7")),
        (lambda: small_vit(mlp="swiglu"), ("net.mlp gelu", "swiglu", "`model.net.mlp` gelu")),
        (lambda: small_vit(qk_norm=True), ("net.qk_norm False", "True", "`model.net.qk_norm` false")),
        (
            lambda: small_vit(dim=32, depth=4),
            ("net.dim 16", "`model.net.dim` 16", "net.depth 2", "`model.net.depth` 2"),
        ),
        (lambda: ResNet(8, 1, width=8, depth=8, num_classes=10, pixels="unit"), ("MAE", "ResNet")),
    ],
    ids=["alphas", "mlp", "qk_norm", "two", "class"],
)
def test_an_encoder_of_another_architecture_is_refused_with_the_flag(mae, net, message):
    with raises_user_error(message):
        start_from(net(), mae[0])


def test_the_last_norm_of_an_encoder_is_not_left_out(tmp_path):
    encoder, file = small_vit(num_classes=0, norm=True), tmp_path / "encoder.safetensors"
    card = ModelCard(net=Spec.of(ViT, encoder.config), class_names=(), data="some", step=0, weights="raw")
    save_tensors(file, encoder.state_dict(), {KEY: json.dumps(card.to_dict())})
    with raises_user_error("`norm`", "true"):
        start_from(small_vit(batch_norm=True, norm=False), file)
    other = card.to_dict() | {"net": card.to_dict()["net"] | {"init_args": encoder.config | {"image_size": 16}}}
    save_tensors(tmp_path / "other.safetensors", encoder.state_dict(), {KEY: json.dumps(other)})
    with raises_user_error("other.safetensors"):
        start_from(small_vit(batch_norm=True, norm=True), tmp_path / "other.safetensors")
    for net in (small_vit(batch_norm=True, norm=True), small_vit(pool="mean")):  # which has a norm of its own
        assert "; new: " in start_from(net, file)


def test_a_file_without_this_encoder_is_refused(trained):
    with raises_user_error("UViT", "cls_token", "ViT"):
        start_from(small_vit(), trained)


def test_a_classifier_starts_from_another_and_its_head_is_new(tmp_path):
    fit(tmp_path, max_steps=2, task=fine_tuning())
    net = small_vit(pool="mean", num_classes=3)
    line = start_from(net, tmp_path / "checkpoints" / "last.ckpt")
    find_line(line, "ViT", "ema", "step 2", "new: head.weight, head.bias")
