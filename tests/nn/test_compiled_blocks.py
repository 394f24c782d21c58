"""Networks whose blocks are compiled one by one: blocks of equal structure share a graph, whatever their alphas."""

import jaxtyping
import pytest
import torch
from networks import DECAYED_SIT, MASKED, UVIT, blocks_of, gradients


def uvit():
    return UVIT.loaded(alpha_min=0.7), UVIT.inputs()


def normed():
    return UVIT.small(alpha_min=0.7, zero_init=False, qk_norm=True, norm_type="rms"), UVIT.inputs()


def sit():
    return DECAYED_SIT.loaded(alpha_min=0.7, schedule="learnable"), DECAYED_SIT.inputs()


def mae():
    return MASKED.loaded(alpha_min=0.7), MASKED.inputs()


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("make", "structures"), [(uvit, 2), (normed, 2), (sit, 3), (mae, 2)])
def test_blocks_share_graphs_which_another_batch_size_compiles_at_most_once_more(make, structures, monkeypatch):
    """Structures: with a long skip and without one, in SiT with its own input as skip; an MAE's encoder and decoder."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace the checks of the tests
    net, arguments = make()
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
