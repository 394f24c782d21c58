import json

import jaxtyping
import pytest
import torch
from huggingface_hub import ModelCard
from networks import CONCAT_SIT, DECAYED_SIT, IMAGES, MASKED, UVIT, VIT
from refusals import raises_user_error
from safetensors.torch import load, load_file, save_file, save_model
from uvit_reference import SMALL

from uvit_decay.nn import ResNet, SiT, UViT

NETWORKS = {
    "uvit": (UVIT.loaded(alpha_min=0.7), UVIT.inputs()),
    "uvit-learned": (UVIT.loaded(schedule="learnable", alpha_min=0.7), UVIT.inputs()),
    "sit": (DECAYED_SIT.loaded(alpha_min=0.6), DECAYED_SIT.inputs()),
    "sit-concat": (CONCAT_SIT.loaded(schedule="learnable", alpha_min=0.6), CONCAT_SIT.inputs()),
    "mae": (MASKED.loaded(alpha_min=0.8).net, MASKED.inputs()),
    "vit": (VIT.loaded(), VIT.inputs()),
    "resnet": (ResNet(8, num_classes=3, width=8, alpha_min=0.7), (IMAGES,)),
}


@pytest.fixture
def network():
    return NETWORKS["uvit"][0]


def output(net, inputs):
    result = net.eval()(*inputs)
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize(("network", "inputs"), NETWORKS.values(), ids=NETWORKS)
def test_a_folder_gives_the_same_network(network, inputs, tmp_path):
    network.save_pretrained(tmp_path)
    loaded = type(network).from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == network.config == loaded.config
    assert not loaded.training
    assert loaded.state_dict().keys() == network.state_dict().keys() == load_file(tmp_path / "model.safetensors").keys()
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in network.parameters()]
    assert torch.equal(output(loaded, inputs), output(network, inputs))
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "uvit_decay"
    assert "decayed-identity-shortcuts" in card.data.tags
    assert card.data.license is None


def test_what_does_not_fit_is_refused(network, tmp_path, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # whose checks of types would come first
    network.save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    arguments, content = json.loads(config.read_text()), weights.read_bytes()
    state = load(content)  # not load_file, whose tensors lie in the file that is written anew here

    with raises_user_error("SiT", tmp_path, "skip", True):
        SiT.from_pretrained(tmp_path)
    with raises_user_error("UViT", tmp_path, "alpha_min", 0.7, 0.5):
        UViT.from_pretrained(tmp_path, alpha_min=0.5)

    weights.write_bytes(content[:-1])
    with raises_user_error("UViT", tmp_path):
        UViT.from_pretrained(tmp_path)
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with raises_user_error("UViT", weights, "damaged"):
        UViT.from_pretrained(tmp_path)
    save_model(network, str(weights))  # as huggingface_hub writes it, without checksums
    assert torch.equal(output(UViT.from_pretrained(tmp_path), UVIT.inputs()), output(network, UVIT.inputs()))
    save_file({name: value for name, value in state.items() if name != "norm.weight"}, weights)
    with raises_user_error("UViT", tmp_path, "Missing key", '"norm.weight"'):
        UViT.from_pretrained(tmp_path, strict=False)  # loading is strict whatever is asked
    save_file(state | {"more": torch.zeros(1)}, weights)
    with raises_user_error("UViT", tmp_path, "Unexpected key", '"more"'):
        UViT.from_pretrained(tmp_path)
    save_file(state, weights)

    for text, fragments in [
        (json.dumps(arguments | {"depth": "4"}), ("depth", 4)),
        ("{", "line 1 column 2"),
    ]:
        config.write_text(text)
        with raises_user_error("UViT", tmp_path, fragments):
            UViT.from_pretrained(tmp_path)
    config.unlink()
    with raises_user_error("UViT", tmp_path, "alpha_min", "10 numbers", "26 numbers"):  # of the default depth
        UViT.from_pretrained(tmp_path)


def test_subclasses_from_elsewhere_work_too(tmp_path):
    class Mine(UViT, tags=["mine"]):
        def __init__(self, width: int) -> None:
            super().__init__(**SMALL | {"dim": width})
            self.config = {"width": width}

    net = Mine(64)
    net.save_pretrained(tmp_path)
    assert "mine" in ModelCard.load(tmp_path / "README.md").data.tags
    loaded = Mine.from_pretrained(tmp_path)
    assert torch.equal(loaded.pos_embed, net.pos_embed)
    assert torch.equal(Mine.from_pretrained(tmp_path, width=64).pos_embed, net.pos_embed)
