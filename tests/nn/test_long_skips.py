"""Scales of long skips: every kind against its formula; recorded and compared, compiled, refused.

That `stream` makes the schedule `gain` the decay is in test_equivalence.py.
"""

import math

import pytest
import torch
from mae_reference import SMALL as SMALL_MAE
from networks import CONCAT_SIT, DECAYED_SIT, IMAGES, NOISE, UVIT, blocks_of, gradients, mae
from reference import linear
from torch import nn

from uvit_decay.files.instantiate import Spec, build
from uvit_decay.nn import MAE
from uvit_decay.nn.mae import unshuffle
from uvit_decay.terminal.errors import UserError

SKIPS = (UVIT, DECAYED_SIT, CONCAT_SIT)  # two skips each, from the states after block 1 (read first) and block 0
SCALES = (0.5, "kappa", "kappa:0.7", "learned", "learned-each", "stream", "stream:0.8")
each_kind = pytest.mark.parametrize("kind", SKIPS, ids=lambda kind: kind.name)
each_scale = pytest.mark.parametrize("scale", SCALES)


def options(scale):
    return {"skip_scale": scale, **({"schedule": "gain", "alpha_min": 0.6} if scale == "stream" else {})}


def products(blocks, alpha_min):
    """P before each block, of the linear schedule."""
    last = 2 * blocks - 1
    return [math.prod(1 - (1 - alpha_min) * k / last for k in range(2 * i)) for i in range(blocks + 1)]


def by_hand(net, blocks, scale, j, state):
    """Return the factors of skip j, written again from the papers; c is a number or one factor a token."""
    if isinstance(scale, float):
        return scale, 1.0
    kind, _, value = scale.partition(":")
    if kind == "kappa":
        return float(value or 0.5) ** (1 - j), 1.0
    if kind == "stream":
        p = products(blocks, float(value or 0.6))
        return p[2 - j] / p[blocks - 2 + j], 1 / p[blocks - 2 + j]
    weights = {name: tensor.detach() for name, tensor in net.named_parameters()}
    gate = f"long_skips.gates.{j if kind == 'learned-each' else 0}"
    hidden = linear(weights, f"{gate}.fc1", state.mean(-1)).relu()
    return linear(weights, f"{gate}.fc2", hidden).sigmoid()[..., None], 1.0


@each_scale
@each_kind
def test_merges_compute_their_formula(kind, scale):
    torch.manual_seed(0)
    net = kind.small(**options(scale)).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)
    calls, merged = [], []
    blocks = blocks_of(net)
    for block in blocks:
        block.register_forward_hook(lambda _, args, out: calls.append((args[0], out)))
        block.norm1.register_forward_pre_hook(lambda _, args: merged.append(args[0]))
    x, t, y = kind.inputs()
    with torch.no_grad():
        net(x.double(), t.double(), y)
    assert len(calls) == len(blocks)
    for j in range(2):
        k = len(blocks) - 2 + j
        tokens, state = calls[k][0], calls[1 - j][1]
        c, d = by_hand(net, len(blocks), scale, j, state)
        layer = blocks[k].skip_linear if kind is UVIT else blocks[k].skip
        weight, bias = layer.weight, layer.bias * d
        read = c * state if kind is DECAYED_SIT else torch.cat([tokens, c * state], dim=-1)
        expected = read @ weight.T + bias + (tokens if kind is DECAYED_SIT else 0)
        torch.testing.assert_close(merged[k], expected, rtol=1e-12, atol=1e-12)


@each_scale
def test_skip_layers_compute_their_formula(scale):
    """Fixed factors scale the encoder's state before mask tokens enter; a gate reads all tokens."""
    torch.manual_seed(0)
    net = MAE(**SMALL_MAE | {"decoder_depth": 1}, wiring="decayed", zero_init=False, **options(scale)).double()
    for gate in net.long_skips.gates:
        nn.init.ones_(gate.fc1.bias)  # its single hidden unit is not dead
    layer, p = net.skip[0], products(4, 0.6)
    state, y = torch.randn(2, 5, 16).double().requires_grad_(), torch.randn(2, 17, 24).double()
    restore = torch.stack([torch.randperm(16) for _ in range(2)])
    if isinstance(scale, str) and scale.startswith("learned"):
        tokens = unshuffle(state, layer.mask_token, restore)
        tokens = tokens * by_hand(net, 4, scale, 0, tokens)[0]
    else:
        # the source is block 4, the second of those that skips read
        c = {0.5: 0.5, "kappa": 0.5, "kappa:0.7": 0.7, "stream": p[4], "stream:0.8": products(4, 0.8)[4]}[scale]
        tokens = unshuffle(c * state, layer.mask_token, restore)
    expected = y + layer.fc(torch.cat([tokens, y], dim=-1))
    merged = net._merge_skip(0, state, y, restore)
    torch.testing.assert_close(merged, expected, rtol=1e-12, atol=1e-12)
    slopes = [torch.autograd.grad(each.square().sum(), state)[0] for each in (merged, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-10)


@each_scale
@each_kind
def test_scales_are_recorded_and_another_one_is_refused(kind, scale):
    net, plain = kind.small(**options(scale)), kind.small()
    kind.small(**options(scale)).load_state_dict(net.state_dict())
    again = build(Spec.of(type(net), net.config), type(net), "uvit_decay.nn")
    again.load_state_dict(net.state_dict())
    learned = str(scale).startswith("learned")
    if not learned:
        kind.loaded(**options(scale))  # official files hold no factors, and load as they do with other alphas
    for other, state in ((kind.small(**options(0.25)), net), (plain, net), (net, plain)):
        own = {name: value for name, value in other.state_dict().items() if name in ("alphas", "betas")}
        with pytest.raises((UserError, RuntimeError), match="skip"):
            other.load_state_dict({**state.state_dict(), "betas": torch.ones(0)} | own)
    assert list(plain.state_dict()) == list(kind.small(skip_scale=1.0).state_dict())
    assert learned == any(name.startswith("long_skips") for name, _ in net.named_parameters())


def test_fixed_scales_load_under_a_default_dtype_of_float64():
    torch.set_default_dtype(torch.float64)
    try:
        net = UVIT.small(skip_scale="kappa:0.7")
        net.load_state_dict(UVIT.small(skip_scale="kappa:0.7").float().state_dict())
    finally:
        torch.set_default_dtype(torch.float32)


@each_kind
def test_weights_start_as_a_plain_network_s(kind):
    torch.manual_seed(0)
    plain = kind.small().state_dict()
    torch.manual_seed(0)
    scaled = kind.small(skip_scale="learned-each").state_dict()
    assert all(torch.equal(scaled[name], value) for name, value in plain.items())


@pytest.mark.parametrize(
    ("kind", "scale", "checkpointing"),
    [(UVIT, "kappa:0.7", False), (CONCAT_SIT, "stream:0.8", True), (DECAYED_SIT, "learned-each", True)],
)
def test_compiled_and_recomputed_blocks_compute_the_same(kind, scale, checkpointing, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # dynamo cannot trace the checks of the tests
    torch._dynamo.reset()
    arguments = kind.inputs()
    net = kind.small(skip_scale=scale).train()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    expected = gradients(net, arguments)
    again = kind.small(skip_scale=scale, checkpointing=checkpointing).train()
    again.load_state_dict(net.state_dict())
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    for block in blocks_of(again):
        block.compile(backend=backend)
    for name, gradient in gradients(again, arguments).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)
    assert len(graphs) <= 3  # blocks with a long skip, without one, and in SiT with its own input as skip
    torch._dynamo.reset()


def test_gates_get_gradients_in_all_networks():
    uvit = UVIT.small(skip_scale="learned", zero_init=False)
    for net, arguments in ((mae(skip_scale="learned"), (IMAGES, NOISE)), (uvit, UVIT.inputs())):
        found = gradients(net, arguments)
        gates = [gradient for name, gradient in found.items() if "gates" in name]
        assert len(gates) == 4
        assert all(gradient is not None for gradient in gates)
