"""decay.attach refuses unknown models, names that do not fit, and a second call."""

import copy

import pytest
import torch
from diffusers import DiTTransformer2DModel
from foreign_models import MODELS, hooks
from foreign_resnets import RESNETS
from refusals import raises_user_error
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from torch import nn

from uvit_decay import decay

ALL = {**MODELS, **RESNETS}
PROJ, DOWN = "layers.0.self_attn.out_proj", "layer2.0.downsample"


@pytest.mark.parametrize("model", MODELS)
def test_attaching_twice_is_refused_until_removed(model):
    case = MODELS[model]()
    attached = decay.attach(case.model, 0.7)
    for again in (case.model, case.blocks()[0], copy.deepcopy(case.model)):
        with raises_user_error("remove()"):
            decay.attach(again, 0.7)
    attached.remove()
    attached.remove()
    decay.attach(case.model, 0.7)


def test_a_model_that_is_refused_stays_as_it_was():
    model = MODELS["timm"]()
    pairs = [*model.pairs[:2], decay.Gated("blocks.1", ("norm1", "norm2"))]
    with raises_user_error("depth_scaled", "norms"):
        decay.attach(model.model, 1.0, schedule="depth_scaled", pairs=pairs)
    assert not hooks(model.model)
    with raises_user_error("Gated('blocks.1', ())"):
        decay.attach(model.model, 0.7, pairs=[decay.Gated("blocks.1", ())])
    decay.attach(model.model, 0.7)


def test_models_without_known_blocks_are_refused_with_the_way_out():
    for model in (nn.Linear(2, 2), VisionTransformer(32, 8, embed_dim=24, depth=1, num_heads=2, block_fn=ResPostBlock)):
        with raises_user_error("pairs=[('blocks.0.norm1',"):
            decay.attach(model, 0.7)
    with raises_user_error("norm_first"):
        decay.attach(nn.TransformerEncoderLayer(16, 2), 0.7)
    ada = {"norm_type": "ada_norm_zero", "num_embeds_ada_norm": 4}
    dit = DiTTransformer2DModel(2, 8, 4, num_layers=1, sample_size=8, **ada)
    dit.transformer_blocks[0].attn2 = dit.transformer_blocks[0].attn1
    with raises_user_error("DiT"):
        decay.attach(dit, 0.7)


@pytest.mark.parametrize(
    ("model", "pairs", "message"),
    [
        ("timm", [("nowhere", "blocks.0.drop_path1"), ("blocks.0.norm2", "blocks.0.drop_path2")], "'nowhere'"),
        ("timm", [("blocks.0.norm1", "blocks.0.drop_path1")], "twos"),
        ("timm", [("blocks.0.norm1", "blocks.0.drop_path1")] * 2, "same module"),
        ("timm", [], "pairs"),
        ("torchvision-basic", [decay.Single("layer2.0.conv1", "layer2.0.nothing", DOWN)], "'layer2.0.nothing'"),
    ],
)
def test_pairs_that_cannot_be_are_refused(model, pairs, message):
    model = ALL[model]().model
    with raises_user_error(message):
        decay.attach(model, 0.7, index="v2", pairs=pairs)
    assert hooks(model) == 0


@pytest.mark.parametrize(
    ("model", "pairs", "message"),
    [
        (
            "timm",
            [("blocks.0.drop_path1", "blocks.0.norm1"), ("blocks.0.norm2", "blocks.0.drop_path2")],
            "'blocks.0.norm1'",
        ),
        ("timm", [("blocks.0.norm1", "blocks.0"), ("blocks.0.norm2", "head_drop")], "'head_drop'"),
        ("timm", [("blocks.0.norm1", "blocks.0.mlp.fc1"), ("norm", "blocks.0.mlp.drop1")], "'blocks.0.mlp.fc1'"),
        ("timm", [("blocks.0.norm1", "blocks.0.drop_path1"), ("blocks.1", "blocks.0.mlp")], ("'blocks.0.mlp'", 0)),
        ("timm", [("blocks.0.norm1", "norm_pre"), ("blocks.1.norm1", "blocks.1.drop_path1")], ("'norm_pre'", 0)),
        ("timm", [("norm", "fc_norm"), ("blocks.0.norm2", "blocks.0.attn.q_norm")], ("'blocks.0.attn.q_norm'", 0)),
        ("timm", [decay.Gated("blocks.0", ("norm1", "mlp.fc2"))], "shape"),
        ("torch", [("layers.0.norm1", PROJ), ("layers.0.norm2", "layers.0.dropout2")], f"'{PROJ}'"),  # is not called
        (
            "torchvision-basic",
            [decay.Single("layer2.0.conv1", "layer2.0.bn2", "layer3.0.downsample")],
            ("layer3.0.downsample", "layer2.0.bn2"),
        ),
        ("torchvision-basic", [decay.Single("layer2.0.conv1", "layer2.0.bn2", "fc")], ("'fc'", "tensor")),
        ("torchvision-basic", [decay.Single("layer2.0.conv1", "layer4.0.bn2", DOWN)], (f"'{DOWN}'", "tensor")),
        ("torchvision-basic", [decay.Single("layer2.0.conv1", "layer2.0.bn2", "layer1.0")], 0),
    ],
)
def test_wrongly_named_modules_are_refused_in_the_forward(model, pairs, message):
    case = ALL[model]()
    decay.attach(case.model, 0.7, index="v2", pairs=pairs)
    with raises_user_error(message):
        case()


class InPlace(nn.Module):
    """A gated block that writes over its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.linear = nn.LayerNorm(4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        x += 0.5 * self.linear(self.norm1(x))
        x += 0.5 * self.linear(self.norm2(x))
        return x


def test_a_gated_block_that_adds_in_place_is_refused_in_the_forward():
    block = InPlace()
    decay.attach(block, 0.7, pairs=[decay.Gated("", ("norm1", "norm2"))])
    with raises_user_error("in place"), torch.no_grad():
        block(torch.randn(2, 4))
