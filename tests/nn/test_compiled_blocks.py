"""Networks whose blocks are compiled one by one: blocks of equal structure share a graph, whatever their alphas."""

import jaxtyping
import pytest
import torch
from networks import DECAYED_SIT, MASKED, UVIT, blocks_of, gradients
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from uvit_decay.decay import shortcuts


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "build", "options", "structures"),
    [
        (UVIT, UVIT.loaded, dict(), 2),
        (UVIT, UVIT.small, dict(zero_init=False, qk_norm=True, norm_type="rms"), 2),
        (DECAYED_SIT, DECAYED_SIT.loaded, dict(schedule="learnable"), 3),
        (MASKED, MASKED.loaded, dict(), 2),
    ],
)
def test_blocks_share_graphs_which_another_batch_size_compiles_at_most_once_more(
    kind, build, options, structures, monkeypatch
):
    """Structures: with a long skip and without one, in SiT with its own input as skip; an MAE's encoder and decoder."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace the checks of the tests
    net, arguments = build(alpha_min=0.7, **options), kind.inputs()
    expected = {name: value.clone() for name, value in gradients(net, arguments).items()}
    net.zero_grad()
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    for block in blocks_of(net):
        block.compile(backend=backend, fullgraph=True)
    for name, gradient in gradients(net, arguments).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)
    assert len(compiled) == structures
    for times, error in ((1, True), (2, False), (3, True)):
        with torch._dynamo.config.patch(error_on_recompile=error):
            net(*(torch.cat([value] * times) for value in arguments))
    assert len(compiled) <= 2 * structures


def test_a_graph_reads_learned_weights_on_the_device_on_which_they_were_created(monkeypatch):
    learned, network = shortcuts(2, 0.7, "learnable"), nn.Module()
    with FakeTensorMode(), torch.device("cuda"):
        learned.register(network, dim=1)
        connections = learned.connections(network, dim=1)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert {connection.weights().alpha.device.type for connection in connections[:-1]} == {"cuda"}
