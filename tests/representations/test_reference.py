"""Features of references are timm's own, of the pictures that are probed."""

from pathlib import Path

import timm
import torch
from conftest import ROOT
from safetensors.torch import save_file
from timm.models.vision_transformer import checkpoint_filter_fn
from timm_weights import NAME, weights

from uvit_decay.data import Digits
from uvit_decay.encoders.networks import open_network
from uvit_decay.generation.options import LoadingOptions
from uvit_decay.latents import Latents
from uvit_decay.latents.autoencoder import Autoencoder
from uvit_decay.representations.reference import ReferenceNetwork
from uvit_decay.runtime.distributed import Processes

CPU = torch.device("cpu")


def test_an_exported_file_is_titled_by_its_name():
    network = open_network(ROOT / "checkpoints" / "digits.safetensors", LoadingOptions())
    assert network.title.startswith("digits.safetensors, step 2000")


def test_features_are_timms_final_patch_tokens_of_enlarged_pictures(tmp_path):
    model = weights()
    save_file(model.state_dict(), tmp_path / "vit.safetensors")
    data = Digits()
    data.setup()
    opened = open_network(Path(f"timm:{NAME}={tmp_path / 'vit.safetensors'}"), LoadingOptions(), 48)
    network = ReferenceNetwork(opened, CPU, "float32", 256)
    chosen = list(range(40, 80))
    reference = network.features(data, chosen, 25, Processes())
    assert len(reference.rows) == 25
    other = timm.create_model(NAME, img_size=48).eval()
    other.load_state_dict(checkpoint_filter_fn(model.state_dict(), other))
    x = data.test.images[[chosen[row] for row in reference.rows]].float().expand(-1, 3, -1, -1) / 127.5 - 1
    x = torch.nn.functional.interpolate(x, size=(48, 48), mode="bicubic", antialias=True).clamp(-1, 1) / 2 + 0.5
    config = timm.data.resolve_model_data_config(model)
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        expected = other.forward_features((x - mean) / std)[:, other.num_prefix_tokens :].mean(dim=1)
    torch.testing.assert_close(reference.features, expected, atol=1e-5, rtol=1e-4)
    assert reference.about["pictures"].startswith("clean, 48 pixels")
    few = network.features(data, chosen, 100, Processes())
    assert few.rows == list(range(40))
    torch.testing.assert_close(few.features[reference.rows], reference.features, atol=1e-5, rtol=1e-4)


def test_latents_are_decoded_for_a_reference(encoded, vae):
    data = Latents(str(encoded), batch_size=11, num_workers=0)
    data.setup()
    data.test = data.train
    autoencoder = Autoencoder(str(vae))
    opened = open_network(Path("pixels:32x32x3"), LoadingOptions())
    reference = ReferenceNetwork(opened, CPU, "float32", 8, autoencoder).features(data, [*range(14)], 12, Processes())
    x = autoencoder.decode(data.network_input(data.train[reference.rows][0]))
    torch.testing.assert_close(reference.features, x.flatten(1) / 127.5 - 1, atol=1.1 / 127.5, rtol=0)
    assert "decoded from latents" in reference.about["pictures"]
    # The precision is that of the reference network, which computes nothing here, and not of the autoencoder.
    narrow = ReferenceNetwork(opened, CPU, "bf16", 8, autoencoder).features(data, [*range(14)], 12, Processes())
    assert torch.equal(narrow.features, reference.features)
