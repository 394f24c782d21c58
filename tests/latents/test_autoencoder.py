"""Autoencoders at the border: one scale in both directions, slices, fingerprints, and files that do not fit."""

import json
import math
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from conftest import save_tiny_vae
from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderTiny
from refusals import raises_user_error
from safetensors.torch import load_file, save_file

from uvit_decay.files.validation import as_type
from uvit_decay.latents import autoencoder
from uvit_decay.latents.autoencoder import Autoencoder, decoder
from uvit_decay.latents.space import LatentSpace
from uvit_decay.pictures import to_float, to_uint8
from uvit_decay.terminal.errors import UserError

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return an AutoencoderTiny with the same latents."""
    torch.manual_seed(1)
    options = dict(encoder_block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4)
    folder = tmp_path_factory.mktemp("tiny")
    AutoencoderTiny(num_encoder_blocks=(1,) * 4, num_decoder_blocks=(1,) * 4, **options).save_pretrained(folder)
    return folder


def random_images(count=3, size=64):
    return torch.randint(256, (count, 3, size, size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def changed(folder, target, **values):
    """Return a copy of a saved autoencoder with other values in its configuration."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text()) | values
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_moments_are_those_of_the_library(vae):
    moments = Autoencoder(str(vae)).encode(random_images())
    with torch.no_grad():
        posterior = AutoencoderKL.from_pretrained(vae).encode(to_float(random_images())).latent_dist
    torch.testing.assert_close(moments[:, :4], posterior.mean)
    torch.testing.assert_close(moments[:, 4:], posterior.logvar)


@pytest.mark.parametrize("options", [dict(), dict(variant="fp16"), dict(max_shard_size="50KB", variant="fp16")])
def test_the_folder_of_a_pipeline_means_its_autoencoder_of_any_variant(vae, tmp_path, options):
    AutoencoderKL.from_pretrained(vae).save_pretrained(tmp_path / "vae", **options)
    (tmp_path / "model_index.json").write_text(json.dumps({"vae": ["diffusers", "AutoencoderKL"]}))
    space = Autoencoder(str(tmp_path)).space
    assert replace(space, vae=str(vae)) == Autoencoder(str(vae)).space
    assert space.vae == str(tmp_path / "vae")


def test_a_copy_on_another_device_leaves_the_first_where_it_is(vae):
    home = Autoencoder(str(vae))
    x = home.space.mean(home.encode(random_images()))
    before, away = home.decode(x), home.on("meta")
    assert {value.device.type for value in away.net.state_dict().values()} == {"meta"}
    assert torch.equal(home.decode(x), before)


def test_networks_see_the_scaled_latents_and_decoding_takes_the_scale_back(vae):
    actual = Autoencoder(str(vae))
    z = actual.encode(random_images())[:, :4]
    x = actual.space.mean(actual.encode(random_images()))
    torch.testing.assert_close(x, 0.18215 * z)
    with torch.no_grad():
        expected = to_uint8(AutoencoderKL.from_pretrained(vae).decode(z).sample)
    difference = (actual.decode(x).int() - expected.int()).abs()
    assert difference.max() <= 1
    assert expected.float().std() > 5  # an image, not one colour: a forgotten scale would show
    assert (actual.decode(z).int() - expected.int()).abs().max() > 1


def test_bfloat16_takes_channels_last_and_float32_keeps_its_layout(vae):
    exact, rough = Autoencoder(str(vae)), Autoencoder(str(vae), dtype=torch.bfloat16)
    for net, last in ((exact.net, False), (rough.net, True), (rough.on("cpu").net, True)):
        assert net.encoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last) is last
    assert rough.space == exact.space
    moments = exact.encode(random_images())
    assert 0 < (rough.encode(random_images()) - moments).norm() / moments.norm() < 0.02


def test_posterior_samples_have_the_moments_mean_and_variance():
    space = LatentSpace("x", "", 0.5, 0.1, 1, 8)
    moments = torch.tensor([2.0, -1.0]).reshape(1, 2, 1, 1).expand(200_000, 2, 1, 1).half()
    before = moments.clone()
    x = space.sample(moments, torch.randn(200_000, 1, 1, 1, generator=torch.Generator().manual_seed(0)))
    assert x.dtype == torch.float32
    assert x.mean() == pytest.approx((2.0 - 0.1) * 0.5, abs=3e-3)
    assert x.std() == pytest.approx(0.5 * math.exp(-0.5), rel=1e-2)
    assert torch.equal(moments, before)
    torch.testing.assert_close(space.denormalise(space.normalise(x)), x)


def test_slices_change_nothing(vae, monkeypatch):
    actual = Autoencoder(str(vae))
    x = actual.space.mean(actual.encode(random_images(5)))
    whole = actual.decode(x)
    monkeypatch.setattr(autoencoder, "SLICE_PIXELS", 2 * 64 * 64)
    sizes = []
    actual.net.decoder.register_forward_hook(lambda module, args, out: sizes.append(len(args[0])))
    assert (actual.decode(x).int() - whole.int()).abs().max() <= 1
    assert sizes == [2, 2, 1]
    monkeypatch.setattr(autoencoder, "SLICE_PIXELS", 1)  # an image larger than a slice is decoded alone
    assert actual.decode(torch.zeros(2, 4, 8, 8)).shape == (2, 3, 64, 64)


def test_a_tiny_autoencoder_has_no_variance_and_no_scale_of_its_own(tiny):
    actual = Autoencoder(str(tiny))
    moments = actual.encode(random_images())
    with torch.no_grad():
        expected = AutoencoderTiny.from_pretrained(tiny).encode(to_float(random_images())).latents
    torch.testing.assert_close(actual.space.mean(moments), expected)
    noise = torch.randn(expected.shape)
    torch.testing.assert_close(actual.space.sample(moments, noise), expected, atol=1e-5, rtol=0)


def test_the_fingerprint_is_of_the_weights_alone(vae, tmp_path):
    again = save_tiny_vae(tmp_path / "again")
    other = save_tiny_vae(tmp_path / "other", seed=1)
    first, second, third = (Autoencoder(str(folder)).space.sha256 for folder in (vae, again, other))
    assert first == second != third


def test_the_linear_map_makes_images():
    rgb = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, -1.0]]
    x = torch.zeros(1, 4, 2, 2)
    x[:, 0], x[:, 1] = 1.0, -1.0
    shown = LatentSpace("x", "", 1.0, 0.0, 4, 8, rgb).preview(x)
    assert shown.shape == (1, 3, 2, 2)
    assert shown[0, :, 0, 0].tolist() == [255, 0, 0]
    with raises_user_error("linear"):
        LatentSpace("x", "", 1.0, 0.0, 4, 8).preview(x)


def test_the_checkpoints_autoencoder_decodes_and_another_one_of_the_same_latents_may(vae, tiny, tmp_path):
    space = Autoencoder(str(vae)).space
    assert decoder(space, None, "cpu").space == space
    assert decoder(space, str(tiny), "cpu").is_tiny
    assert decoder(space, str(save_tiny_vae(tmp_path / "other", seed=1)), "cpu").space.sha256 != space.sha256


def test_another_scale_is_refused_with_both_values(vae, tmp_path):
    other = changed(vae, tmp_path / "other", scaling_factor=0.13025)
    with raises_user_error("scale 0.18215", "0.13025"):
        decoder(Autoencoder(str(vae)).space, str(other), "cpu")
    imported = replace(Autoencoder(str(vae)).space, vae=str(other), sha256="")
    with raises_user_error("scale 0.18215", "0.13025"):  # no --vae was given
        decoder(imported, None, "cpu")


def test_weights_that_changed_meanwhile_are_refused_unless_they_are_named(tmp_path):
    folder = save_tiny_vae(tmp_path / "vae")
    space = Autoencoder(str(folder)).space
    save_tiny_vae(tmp_path / "vae", seed=1)
    with raises_user_error("`vae`"):
        decoder(space, None, "cpu")
    decoder(space, str(folder), "cpu")


def test_what_is_no_autoencoder_is_refused_in_one_line(vae, tmp_path):
    (tmp_path / "empty").mkdir()
    half = changed(vae, tmp_path / "half")
    weights = load_file(half / WEIGHTS)
    weights.pop("decoder.conv_out.bias")
    save_file(weights, half / WEIGHTS)
    cut = changed(vae, tmp_path / "cut")
    (cut / WEIGHTS).write_bytes(b"no weights")
    for folder, message in (
        (tmp_path / "empty", "loaded"),
        (changed(vae, tmp_path / "scaleless", scaling_factor=None), "configuration"),
        (changed(vae, tmp_path / "odd", block_out_channels="x"), "loaded"),
        (changed(vae, tmp_path / "blocks", down_block_types=[], up_block_types=[]), "autoencoder"),
        (changed(vae, tmp_path / "unet", _class_name="UNet2DModel"), "autoencoder"),
        (tmp_path / "missing", "loaded"),
        (half, (1, "decoder.conv_out.bias")),
        (cut, "cut"),
    ):
        with raises_user_error(folder, message):
            Autoencoder(str(folder))


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Return an AutoencoderDC of 4 pixels a cell."""
    torch.manual_seed(2)
    sides = ("encoder", "decoder")
    sizes = {f"{side}_block_out_channels": (8, 8, 8) for side in sides}
    layers = {f"{side}_layers_per_block": (1, 1, 1) for side in sides}
    scales = {f"{side}_qkv_multiscales": ((), (), ()) for side in sides}
    kinds = {f"{side}_block_types": "ResBlock" for side in sides}
    folder = tmp_path_factory.mktemp("deep")
    net = AutoencoderDC(
        latent_channels=4, attention_head_dim=4, scaling_factor=0.4, **sizes, **layers, **scales, **kinds
    )
    net.save_pretrained(folder)
    return folder


def test_an_autoencoder_of_another_class_is_found_by_its_configuration(deep):
    actual = Autoencoder(str(deep))
    assert (actual.space.channels, actual.space.factor, actual.space.scale) == (4, 4, 0.4)
    reference = AutoencoderDC.from_pretrained(deep)
    with torch.no_grad():
        z = reference.encode(to_float(random_images())).latent
        images = to_uint8(reference.decode(z).sample)
    x = actual.space.mean(actual.encode(random_images()))
    torch.testing.assert_close(x, 0.4 * z)
    assert (actual.decode(x).int() - images.int()).abs().max() <= 1
    assert decoder(actual.space, None, "cpu").space == actual.space


def test_each_channel_has_a_mean_and_a_deviation_where_the_configuration_has_them(vae, tmp_path):
    mean, std = [0.1, -0.2, 0.3, 0.0], [1.0, 2.0, 0.5, 4.0]
    plain = Autoencoder(str(vae))
    actual = Autoencoder(str(changed(vae, tmp_path / "vae", latents_mean=mean, latents_std=std, scaling_factor=0.5)))
    z = plain.encode(random_images())[:, :4]
    x = actual.space.mean(actual.encode(random_images()))
    columns = [torch.tensor(values)[:, None, None] for values in (mean, std)]
    torch.testing.assert_close(x, (z - columns[0]) * 0.5 / columns[1])  # as pipelines of diffusers do it
    torch.testing.assert_close(actual.space.denormalise(x), z)
    assert (actual.decode(x).int() - plain.decode(plain.space.normalise(z)).int()).abs().max() <= 1
    assert actual.space.scales.tolist() == [0.5, 0.25, 1.0, 0.125]
    with pytest.raises(UserError, match="channel_mean"):
        replace(plain.space, scale=0.5).check_same(actual.space, "one", "two")
    assert as_type(LatentSpace, json.loads(json.dumps(asdict(actual.space))), "space") == actual.space
