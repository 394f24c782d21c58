"""decay.attach on ResNets, in what no transformer has: compiled alone, in DDP, and what is refused."""

from __future__ import annotations

import pytest
import torch
from foreign_models import hooks
from foreign_resnets import RESNETS
from refusals import raises_user_error
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models.resnet import BasicBlock, ResNet

from uvit_decay import decay


@pytest.fixture
def case():
    torch.manual_seed(0)
    return RESNETS["torchvision-basic"]()


def test_compiled_blocks_are_compiled_anew_with_and_without_the_decay(case):
    whole = case.model.eval()
    model, x = nn.Sequential(whole.layer1[1], whole.layer2[0]), torch.randn(2, 8, 6, 6)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        plain = compiled(x)
        attached = decay.attach(model, 0.7, "learnable")
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(compiled(x), plain, rtol=1e-2)
        attached.remove()
        assert torch.equal(compiled(x), plain)


def test_several_devices_wrap_it(case, tmp_path):
    decay.attach(case.model, 0.7)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        DistributedDataParallel(case.model)(case.x).square().mean().backward()
    finally:
        torch.distributed.destroy_process_group()
    case.edited(case.weights(0.7).alphas).square().mean().backward()
    for ours, expected in zip(case.model.parameters(), case.reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"granularity": "block"}, {"branches": "attention"}, {"branches": "mlp"}])
def test_what_makes_no_sense_in_a_resnet_is_refused(case, options):
    with raises_user_error("granularity", "branches"):
        decay.attach(case.model, 0.7, **options)
    with raises_user_error("gain"):
        decay.attach(case.model, 0.7, "gain")
    assert hooks(case.model) == 0


def test_a_mix_of_transformer_and_resnet_is_refused(case):
    model = nn.ModuleList([case.model, nn.TransformerEncoderLayer(8, 2, norm_first=True)])
    with raises_user_error("parts"):
        decay.attach(model, 0.7)
    assert hooks(model) == 0
    decay.attach(model[0], 0.7)


def test_a_branch_that_ends_in_no_tensor_is_refused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.projection = nn.Linear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.first(x))[0] + self.projection(x)

    block = Two()
    decay.attach(block, 0.7, index="v2", pairs=[decay.Single("first", "last", "projection")])
    with raises_user_error("'last'"):
        block(torch.zeros(3, 4))


def test_subclasses_with_another_forward_are_not_known():
    class Other(BasicBlock):
        def forward(self, x):
            return x

    with raises_user_error("ResNet"):
        decay.attach(ResNet(Other, [1, 1, 1, 1]), 0.7)
