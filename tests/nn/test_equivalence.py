"""A decayed network equals the network of plain shortcuts whose branch k is multiplied by 1 / P_{k+1} (`gain`).

Its long skips are scaled, too: `gain` with `skip_scale: stream` is the decay with the same weights.
"""

import math

import mae_reference
import pytest
import torch
from networks import CONCAT_SIT, DECAYED_SIT, SIT, UVIT
from torch import nn

from uvit_decay.decay import shortcuts
from uvit_decay.nn import MAE, ViT

ALPHA_MIN = 0.6


def product(net, blocks):
    """P after this many blocks of the decayed network, the weight of the input in the stream."""
    return math.prod(shortcuts(len(net.shortcuts.alphas) // 2, ALPHA_MIN).alphas[: 2 * blocks])


def vit(**options):
    return ViT(16, 4, 3, 16, 4, 2, num_classes=3, **options), (torch.randn(2, 3, 16, 16),), lambda net: {}


def mae(**options):
    def absorbed(net):
        """SkipLayer i reads the state s after block L - 2 i: its W1 absorbs P, and so does its own mask token."""
        factors = {}
        for i, layer in enumerate(net.skip):
            p = product(net, len(net.blocks) - 2 * i)
            factors[f"skip.{i}.mask_token"] = 1 / p
            factors[f"skip.{i}.fc.0.weight"] = halves(layer.fc[0].in_features, net.dim, p, 1.0)
        return factors

    net = MAE(**mae_reference.SMALL, zero_init=False, **options)
    return net, mae_reference.inputs(**mae_reference.SMALL), absorbed


def denoiser(kind, merges, concat):
    def make(**options):
        def absorbed(net):
            """Return factors by which merges W [x, s] + b or x + W s + b absorb a skip's P over the P of the stream."""
            factors, blocks = {}, kind.blocks
            for j, name in enumerate(merges):
                here, skip = product(net, blocks - len(merges) + j), product(net, len(merges) - j)
                weight = net.get_parameter(f"{name}.weight")
                factors[f"{name}.bias"] = 1 / here
                factors[f"{name}.weight"] = halves(weight.shape[1], net.dim if concat else 0, 1.0, skip / here)
            return factors

        return kind.loaded(**options), kind.inputs(), absorbed

    return make


def halves(columns, split, first, second):
    return torch.tensor([first] * split + [second] * (columns - split), dtype=torch.float64)


CASES = {
    "uvit": denoiser(UVIT, ["out_blocks.0.skip_linear", "out_blocks.1.skip_linear"], concat=True),
    "sit": denoiser(SIT, [], concat=False),
    "sit, added skips": denoiser(DECAYED_SIT, ["dec_blocks.0.skip", "dec_blocks.1.skip"], concat=False),
    "sit, concatenated skips": denoiser(CONCAT_SIT, ["dec_blocks.0.skip", "dec_blocks.1.skip"], concat=True),
    "mae": lambda **options: mae(wiring="official", **options),
    "mae, skips": lambda **options: mae(wiring="decayed", **options),
    "vit": vit,
}


STREAM = {"skip_scale": "stream"}
WITH_SKIPS = ("uvit", "sit, added skips", "sit, concatenated skips", "mae, skips")
OPTIONS = [(name, {}) for name in CASES] + [(name, STREAM) for name in WITH_SKIPS]
OPTIONS += [("uvit", STREAM | {"granularity": "block", "branches": "mlp", "index": "v2"})]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_a_decayed_network_is_a_plain_one_with_gains_but_for_the_eps_of_norms(name, options):
    """Its weights absorb the factors of long skips, or `skip_scale` gives them."""
    torch.manual_seed(0)
    ablations = {option: value for option, value in options.items() if option != "skip_scale"}
    decayed, inputs, absorbed = CASES[name](alpha_min=ALPHA_MIN, **ablations)
    gained = CASES[name](alpha_min=ALPHA_MIN, schedule="gain", **options)[0]
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    for net in (decayed.double(), gained.double()):
        for module in net.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 0.0
    for name, parameter in decayed.named_parameters():
        if name not in ("pos_embed", "decoder_pos_embed"):
            nn.init.normal_(parameter, std=0.3)
    factors = {} if "skip_scale" in options else absorbed(decayed)
    assert decayed.shortcuts.gains[-1] == pytest.approx(gained.shortcuts.betas[-1])
    gained.load_state_dict(
        gained.state_dict() | {name: p.detach() * factors.get(name, 1.0) for name, p in decayed.named_parameters()}
    )
    assert factors.keys() <= dict(decayed.named_parameters()).keys()

    outputs = [net(*inputs) for net in (decayed, gained)]
    ours, theirs = (out[0] if isinstance(out, tuple) else out for out in outputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    for out in (ours, theirs):
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    for name, parameter in decayed.named_parameters():
        if parameter.requires_grad:
            wanted = gained.get_parameter(name).grad * factors.get(name, 1.0)
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-7, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    assert ours.detach().std() > 0.01
