"""MAE, ViT and their classifiers in use: checkpointing of activations, compilation, layers for learning rates."""

import inspect

import jaxtyping
import pytest
import torch
from mae_reference import SMALL, inputs
from networks import gradients

from uvit_decay.nn import MAE, ViT
from uvit_decay.nn.mae import Masking

SIZES = {name: SMALL[name] for name in ("image_size", "patch_size", "channels", "dim", "depth", "heads")}
KEEP = (torch.arange(2 * SMALL["depth"])[:, None] % torch.tensor([2, 3, 5]) > 0).float() * 1.25  # some are dropped


class Reconstruction(torch.nn.Module):
    """The prediction of an MAE alone."""

    def __init__(self, net: MAE) -> None:
        super().__init__()
        self.net = net

    def forward(self, *arguments):
        return self.net(*arguments)[0]


def mae(**options):
    torch.manual_seed(0)
    return Reconstruction(MAE(**SMALL, wiring="decayed", zero_init=False, alpha_min=0.7, **options))


def vit(**options):
    torch.manual_seed(0)
    return ViT(**SIZES, num_classes=5, alpha_min=0.7, **options)


def case(make):
    x, noise = inputs(**SMALL)
    return (x, noise) if make is mae else (x, KEEP[:, : len(x)])


each = pytest.mark.parametrize("make", [mae, vit])


@each
@pytest.mark.parametrize("schedule", ["linear", "learnable"])
def test_recomputed_activations_give_identical_predictions_and_gradients(make, schedule):
    plain, recomputed = make(schedule=schedule), make(schedule=schedule, checkpointing=True)
    calls = []
    recomputed.get_submodule("net.blocks.1" if make is mae else "blocks.1").register_forward_pre_hook(
        lambda *_: calls.append(1)
    )
    expected, actual = gradients(plain, case(make)), gradients(recomputed, case(make))
    assert len(calls) == 2
    assert torch.equal(plain(*case(make)), recomputed(*case(make)))
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        assert gradient is not None, name
        assert torch.equal(gradient, actual[name]), name


@pytest.mark.slow
@each
def test_a_compiled_network_is_one_graph_that_equals_eager(make, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace the checks of the tests
    monkeypatch.setattr(Masking, "mask", property(inspect.unwrap(Masking.mask.fget)))  # nor their wrapper of it
    net, arguments = make(schedule="learnable"), case(make)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), net(*arguments), atol=1e-6, rtol=1e-5)
    actual = {name.removeprefix("_orig_mod."): value for name, value in gradients(compiled, arguments).items()}
    actual = {name: value.clone() for name, value in actual.items()}
    net.zero_grad()
    for name, gradient in gradients(net, arguments).items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "net", [vit(pool="mean", batch_norm=True, schedule="learnable"), mae().net], ids=["vit", "mae"]
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
