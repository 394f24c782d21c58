import copy
import json
import pickle

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load, load_file, save_file

from uvit_decay.nn import MAE, ResNet, SiT, UViT, ViT
from uvit_decay.runtime.errors import UserError

SMALL = dict(image_size=16, patch_size=4, dim=32, depth=2, heads=2)
DECODER = dict(decoder_dim=32, decoder_depth=1, decoder_heads=2)
NETWORKS = {
    "uvit": (UViT, dict(SMALL, num_classes=3, alpha_min=0.7)),
    "uvit-learned": (UViT, dict(SMALL, schedule="learnable", alpha_min=0.7)),
    "sit": (SiT, dict(SMALL, wiring="decayed", alpha_min=0.6, channels=3)),
    "sit-concat": (SiT, dict(SMALL, wiring="decayed", skip="concat", schedule="learnable", alpha_min=0.6)),
    "mae": (MAE, dict(SMALL, **DECODER, wiring="decayed", alpha_min=0.8)),
    "vit": (ViT, dict(SMALL, num_classes=3)),
    "resnet": (ResNet, dict(num_classes=3, width=8, alpha_min=0.7)),
}
each_network = pytest.mark.parametrize("name", NETWORKS)


@pytest.fixture
def network(name):
    kind, options = NETWORKS[name]
    torch.manual_seed(0)
    net = kind(**options)
    for parameter in net.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return net


def output(net):
    torch.manual_seed(1)
    x, t = torch.randn(2, net.channels, net.image_size, net.image_size), torch.tensor([0.3, 0.8])
    inputs = {UViT: (x, t), SiT: (x, t), MAE: (x, torch.rand(2, 16))}.get(type(net), (x,))
    result = net.eval()(*inputs)
    return result[0] if isinstance(result, tuple) else result


@each_network
def test_a_folder_gives_the_same_network(network, tmp_path):
    network.save_pretrained(tmp_path)
    loaded = type(network).from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == network.config == loaded.config
    assert not loaded.training
    assert loaded.state_dict().keys() == network.state_dict().keys() == load_file(tmp_path / "model.safetensors").keys()
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in network.parameters()]
    assert torch.equal(output(loaded), output(network))
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "uvit_decay"
    assert "decayed-identity-shortcuts" in card.data.tags
    assert card.data.license is None


@pytest.mark.parametrize("name", ["uvit"])
def test_networks_carry_nothing_of_the_mixin(network):
    assert not [key for key in vars(network) if "hub" in key]
    for copied in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert vars(copied).keys() == vars(network).keys()
        assert torch.equal(output(copied), output(network))


@pytest.mark.parametrize("name", ["uvit"])
def test_what_does_not_fit_is_refused(network, tmp_path):
    network.save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    arguments, content = json.loads(config.read_text()), weights.read_bytes()
    state = load(content)  # not load_file, whose tensors lie in the file that is written anew here

    for other in {kind for kind, _ in NETWORKS.values()} - {UViT}:
        with pytest.raises(UserError, match="^[^\n]+$"):
            other.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="trained with alphas .*this network has"):
        UViT.from_pretrained(tmp_path, alpha_min=0.5)

    weights.write_bytes(content[:-1])
    with pytest.raises(UserError, match="^cannot load a UViT from .*: "):
        UViT.from_pretrained(tmp_path)
    save_file({name: value for name, value in state.items() if name != "norm.weight"}, weights)
    with pytest.raises(UserError, match='Missing key.*"norm.weight"'):
        UViT.from_pretrained(tmp_path, strict=False)  # loading is strict whatever is asked
    save_file(state | {"more": torch.zeros(1)}, weights)
    with pytest.raises(UserError, match='Unexpected key.*"more"'):
        UViT.from_pretrained(tmp_path)
    save_file(state, weights)

    for text, message in [
        (json.dumps(arguments | {"depth": "2"}), "depth"),
        (json.dumps(arguments | {"dim": 64}), "size mismatch"),
        ("{", "cannot load a UViT from .*: Expecting"),
        ("[1]", "cannot load a UViT from "),
    ]:
        config.write_text(text)
        with pytest.raises(UserError, match=message):
            UViT.from_pretrained(tmp_path)
    config.unlink()
    with pytest.raises(UserError, match="trained with alphas"):
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
