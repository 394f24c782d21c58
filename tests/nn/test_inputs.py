"""Values of times are compared at the first call of a network; the check leaves graphs and weights alone."""

import copy
import pickle

import jaxtyping
import pytest
import torch
from refusals import raises_user_error
from torch._subclasses.fake_tensor import FakeTensorMode

from uvit_decay.nn import MAE, ResNet, SiT, UViT, ViT

SIZES = {"image_size": 8, "patch_size": 4, "channels": 1, "dim": 8, "depth": 2, "heads": 2, "num_classes": 3}
X, T, Y = torch.zeros(2, 1, 8, 8), torch.tensor([0.0, 1.0]), torch.tensor([0, 3])


@pytest.fixture(params=[UViT, SiT])
def net(request):
    return request.param(**SIZES)


@pytest.mark.parametrize("t", [T + 0.5, 999 * T, -T, T.double() * float("nan")], ids=["1.5", "levels", "-1", "nan"])
def test_times_outside_of_the_unit_interval_are_refused_at_the_first_call(net, t):
    with raises_user_error(type(net).__name__, "t", "[0, 1]"):
        net(X, t, Y)
    net(X, T, Y)
    net(X, t, Y)  # a later call does not wait for the device


PLAIN = {name: SIZES[name] for name in SIZES if name != "num_classes"} | {"pixels": "unit"}
NETWORKS = {
    UViT: (SIZES, (T, Y)),
    SiT: (SIZES, (T, Y)),
    ViT: (SIZES | {"pixels": "unit"}, ()),
    MAE: (PLAIN | {"decoder_dim": 8, "decoder_depth": 1, "decoder_heads": 2}, (torch.rand(2, 4),)),
    ResNet: ({"image_size": 8, "channels": 1, "width": 4, "num_classes": 3, "pixels": "unit"}, ()),
}


@pytest.mark.parametrize("kind", NETWORKS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("size", [(2, 1, 16, 16), (2, 3, 8, 8)], ids=["size", "channels"])
def test_images_of_another_size_are_refused(kind, size):
    arguments, conditions = NETWORKS[kind]
    with raises_user_error(kind.__name__, "x"):
        kind(**arguments)(torch.zeros(size), *conditions)


def test_the_note_of_the_first_call_is_in_copies_and_not_in_the_weights(net):
    before = set(net.state_dict())
    net(X, T, Y)
    assert set(net.state_dict()) == before
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(X, T, Y), net(X, T, Y))
        assert other.times_checked


def test_a_compiled_network_has_one_graph_without_breaks_before_and_after_its_first_call(net, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # whose checks cannot be compiled
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(net, backend=count, fullgraph=True)
    compiled(X, T, Y)
    net(X, T, Y)
    compiled(X, T, Y)
    assert len(graphs) == 1


def test_values_are_not_read_where_there_are_none(net, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        net(mode.from_tensor(X), mode.from_tensor(T), mode.from_tensor(Y))
    copy.deepcopy(net).to("meta")(X.to("meta"), T.to("meta"), Y.to("meta"))
    torch.func.vmap(lambda x, t, y: net(x[None], t[None], y[None]))(X, T, Y)
    torch.export.export(net, (X, T, Y))
    assert not net.times_checked
