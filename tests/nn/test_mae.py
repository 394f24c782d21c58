"""MAE and ViT against the published functions, written again in mae_reference."""

import mae_reference as reference
import pytest
import torch
from mae_reference import SMALL, inputs, standardise
from networks import ENCODER, MASKED, VIT
from refusals import raises_user_error

from uvit_decay.nn import MAE, ViT
from uvit_decay.nn.mae import visible_patches
from uvit_decay.nn.sizes import create_model

HEADS = {"heads": SMALL["heads"], "decoder_heads": SMALL["decoder_heads"]}
OFFICIAL = dict(wiring="official")
DECAYED = dict(wiring="decayed", alpha_min=0.6)
WIRINGS = [OFFICIAL, dict(alpha_min=0.7), DECAYED]
SIZES = [  # name, options, total, trainable parameters (facts of the published classes; only SkipLayers that are read)
    ("mae-s/16", "official", 47_578_240, 47_401_728),
    ("mae-1024x12/16", "official", 178_387_200, 178_084_608),
    ("mae-768x18/16", "official", 154_435_072, 154_182_912),
    ("mae-s/16", "decayed", 51_976_832, 51_800_320),
    ("mae-1024x12/16", "decayed", 184_426_752, 184_124_160),
    ("mae-768x18/16", "decayed", 162_576_128 - 919_296, 162_323_968 - 919_296),
]


def small(**options):
    torch.manual_seed(0)
    return MAE(**SMALL | options)


def loaded(dtype=torch.float64, **options):
    """Return a network with random weights in the layout of its file, and these weights."""
    net = small(**options).to(dtype)
    layout = reference.mae_shapes(**SMALL, wiring=options.get("wiring", "official"))
    state = {name: value.to(dtype) for name, value in reference.random_values(layout, 0).items()}
    net.load_state_dict(dict(state), strict=True)
    return net, state


@pytest.mark.parametrize("options", WIRINGS)
def test_prediction_mask_and_loss_are_those_of_the_published_function(options):
    net, state = loaded(**options)
    x, noise = (value.double() for value in inputs(**SMALL))
    prediction, mask = net(x, noise)
    alphas = list(net.shortcuts.alphas)
    theirs, their_mask = reference.mae_forward(state, standardise(x), noise, alphas=alphas, **HEADS)
    assert torch.equal(mask, their_mask.to(mask))
    torch.testing.assert_close(prediction, theirs, rtol=1e-9, atol=1e-9)
    loss = reference.loss(standardise(x), theirs, their_mask, SMALL["patch_size"])
    torch.testing.assert_close(net.reconstruction_loss(x, prediction, mask.double()), loss, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm_pix", [True, False])
def test_targets_are_patches_and_reconstruction_inverts_them(norm_pix):
    net, (x, _) = small(norm_pix=norm_pix), inputs(**SMALL)
    theirs = reference.targets(standardise(x), SMALL["patch_size"], norm_pix)
    torch.testing.assert_close(net.targets(x), theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(net.reconstruct(x, net.targets(x)), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "wiring", "total", "trainable"), SIZES)
def test_published_sizes_have_the_published_numbers_of_parameters(name, wiring, total, trainable):
    with torch.device("meta"):
        net = create_model(name, wiring=wiring)
    assert sum(p.numel() for p in net.parameters()) == total
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == trainable


TABLE_3 = [  # without skips the official decoder input is needed
    dict(wiring="decayed", skips=False, decoder_input="latent", alpha_min=0.6),
    dict(wiring="decayed", schedule="cosine", alpha_min=0.6),
    dict(wiring="decayed", schedule="learnable"),
    dict(schedule="constant-branch"),
    dict(schedule="constant"),
    dict(wiring="decayed", branches="attention", alpha_min=0.6),
    dict(wiring="decayed", branches="mlp", alpha_min=0.6),
    dict(wiring="official", skips=True),
]


@pytest.mark.parametrize(
    ("options", "depth"),
    [*((options, depth) for options in WIRINGS for depth in (4, 18, 24, 32)), *((options, 4) for options in TABLE_3)],
)
def test_every_trained_parameter_gets_a_gradient_so_that_ddp_finds_none_unused(options, depth):
    net = small(**options | dict(depth=depth, decoder_depth=8, zero_init=False))
    x, noise = inputs(**SMALL)
    net.reconstruction_loss(x, *net(x, noise)).backward()
    without = [name for name, p in net.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    assert all(p.grad is None for p in net.parameters() if not p.requires_grad)


def test_residual_branches_skips_and_prediction_of_the_decayed_wiring_start_at_zero():
    net, (x, noise) = small(**DECAYED), inputs(**SMALL)
    assert not net(x, noise)[0].any()
    zero = {name for name, value in net.named_parameters() if name.endswith("weight") and not value.any()}
    ends = ("attn.proj.weight", "mlp.fc2.weight", "fc.2.weight", "decoder_pred.weight")
    assert zero == {name for name, _ in net.named_parameters() if name.endswith(ends)}
    assert small(**DECAYED, zero_init=False)(x, noise)[0].any()


def test_under_autocast_the_residual_stream_of_the_decoder_stays_float32():
    net, (x, noise) = small(**DECAYED), inputs(**SMALL)
    seen = []
    for block in (*net.blocks, *net.decoder_blocks):
        block.register_forward_hook(lambda _, inputs, out: seen.extend([inputs[0].dtype, out.dtype]))
    with torch.autocast("cpu", torch.bfloat16):
        prediction, _ = net(x, noise)
    assert {*seen, prediction.dtype} == {torch.float32}


@pytest.mark.parametrize("ratio", [0.0, 1.0, -1.0, float("nan"), 0.99])
def test_a_mask_removes_some_patches_and_leaves_some(ratio):
    with raises_user_error("mask_ratio"):
        visible_patches(16, ratio)


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_logits_are_those_of_a_fine_tuned_and_of_a_probed_file(pool):
    size = ENCODER
    file = reference.finetuned_file(**size) if pool == "mean" else reference.probed_file(**size)
    state = {name: value.double() if value.is_floating_point() else value for name, value in file["model"].items()}
    net = ViT(**size, num_classes=5, pool=pool, batch_norm=pool == "cls", alpha_min=1.0).double().eval()
    net.load_state_dict(dict(state), strict=True)
    x = inputs(**SMALL)[0].double()
    torch.testing.assert_close(net(x), reference.logits(state, standardise(x), SMALL["heads"]), rtol=1e-9, atol=1e-9)
    states, theirs = (
        list(net.forward_intermediates(x)),
        reference.encoder_states(state, standardise(x), SMALL["heads"]),
    )
    assert len(states) == len(net.layers) == 1 + SMALL["depth"]
    torch.testing.assert_close(states, theirs, rtol=1e-9, atol=1e-9)


def test_stochastic_depth_multiplies_the_outputs_of_branches():
    """With all branches dropped, the tokens are the embeddings times all alphas; with all kept, nothing changes."""
    torch.manual_seed(0)
    net = ViT(8, 2, 3, dim=16, depth=4, heads=2, num_classes=3, norm=False, alpha_min=0.7).double()
    x = inputs(**SMALL)[0].double()
    torch.testing.assert_close(net(x, torch.ones(8, len(x)).double()), net(x), rtol=0, atol=0)
    embedded = net.embed(x)[:, 0]
    product = torch.tensor(net.shortcuts.alphas, dtype=torch.float64).prod()
    torch.testing.assert_close(net.pooled(x, torch.zeros(8, len(x)).double()), embedded * product)


def test_an_encoder_of_any_channels_takes_them_in_their_own_scale():
    net = ViT(8, 2, 5, dim=16, depth=2, heads=2, num_classes=3, pixels="unit")
    assert net(torch.rand(2, 5, 8, 8)).shape == (2, 3)


@pytest.mark.parametrize(
    "net", [VIT.loaded(pool="mean", batch_norm=True, schedule="learnable"), MASKED.loaded().net], ids=["vit", "mae"]
)
def test_layers_for_learning_rates_are_those_of_fine_tuning(net):
    """MAE's code: the embeddings are layer 0, block i is i + 1, all else comes after the blocks."""
    ids = {name: net.layer_id(name) for name, _ in net.named_parameters()}
    embeddings = {"cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}
    assert {name for name, layer in ids.items() if layer == 0} == embeddings
    for i in range(SMALL["depth"]):
        of_block = {name for name in ids if name.startswith(f"blocks.{i}.")}
        assert len(of_block) == 12
        assert {name for name, layer in ids.items() if layer == i + 1} == of_block
    assert {ids[name] for name in ids if not name.startswith("blocks.")} == {0, SMALL["depth"] + 1}
