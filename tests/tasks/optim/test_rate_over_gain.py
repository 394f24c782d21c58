"""Runs of decayed networks with corrected rates follow the plain networks with the same gains, by every optimizer."""

from functools import partial

import pytest
import torch
from refusals import raises_user_error
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW

from uvit_decay.nn import MAE, ResNet, SiT, UViT, ViT
from uvit_decay.tasks.optim.options import Optimization
from uvit_decay.tasks.optim.rate_over_gain import RowSteps
from uvit_decay.tasks.parallel.sharding import full_tensor, shard, shard_like

SIZES = {"image_size": 8, "patch_size": 2, "channels": 1, "dim": 16, "depth": 4, "heads": 2}
DECODER = {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2, "wiring": "official"}
IMAGES = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1
NOISE = torch.rand(4, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
TIMES, LABELS = torch.tensor([0.1, 0.4, 0.6, 0.9], dtype=torch.float64), torch.arange(4)


def denoising(net):
    return (net(IMAGES, TIMES, LABELS) - IMAGES.flip(0)).square().mean()


def reconstruction(net):
    return net.reconstruction_loss(IMAGES, *net(IMAGES, NOISE))


FAMILIES = {
    "ViT": (
        lambda **options: ViT(**SIZES, num_classes=4, pixels="unit", **options),
        lambda net: nn.functional.cross_entropy(net(IMAGES), LABELS),
    ),
    "U-ViT without skips": (
        lambda **options: UViT(**SIZES, num_classes=4, skip=False, zero_init=False, init="xavier", **options),
        denoising,
    ),
    "MAE": (lambda **options: MAE(**SIZES, **DECODER, pixels="unit", **options), reconstruction),
    "SiT": (lambda **options: SiT(**SIZES, num_classes=4, **options), denoising),
    "DiT": (lambda **options: SiT(**SIZES, num_classes=4, time="dit", **options), denoising),
}
RATES = {"adamw": 1e-3, "sgd": 1e-2, "muon": 1e-3}
# Adam's eps is compared with gradients of another scale; Muon orthogonalises in bfloat16. Uncorrected: above 2e-3.
TOLERANCES = {"adamw": 1e-6, "sgd": 1e-12, "muon": 5e-4}


def build(family, **options):
    """Return a network in float64 whose norms have no eps, with random numbers where it begins with 0."""
    net = FAMILIES[family][0](alpha_min=options.pop("alpha_min", 0.6), **options).double()
    random = torch.Generator().manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 0.0
    for name, parameter in net.named_parameters():
        if parameter.requires_grad and "norm" not in name:
            nn.init.normal_(parameter, std=0.2, generator=random)
    return net


def plain_network(family, decayed):
    """Return the equivalent plain network of `decayed`: its branches include the gains."""
    plain = build(family, alpha_min=1.0)
    weights = {name: value.detach().clone() for name, value in decayed.named_parameters()}
    for rows, gain in zip(decayed.branch_factors(), decayed.shortcuts.gains, strict=True):
        for name in (f"{rows.module}.weight", f"{rows.module}.bias"):
            weights[name].chunk(rows.parts)[rows.part].mul_(gain)
    plain.load_state_dict(plain.state_dict() | weights)
    return plain


def losses(family, net, name, steps, **options):
    optimizer = Optimization(optimizer=name, weight_decay=0.0, **options).build(net, RATES[name])
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = FAMILIES[family][1](net)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("family", FAMILIES)
def test_decay_and_gain_with_corrected_rates_follow_the_plain_network(family, name):
    decayed, gained = build(family), build(family, schedule="gain")
    if name == "muon" and family in ("SiT", "DiT"):
        with raises_user_error("muon", type(decayed).__name__):
            losses(family, decayed, name, 1, rate_over_gain=True)
        return
    steps = 20 if name == "adamw" else 6
    wanted = losses(family, plain_network(family, decayed), name, steps)
    assert (wanted[0] - wanted[-1]).abs() > 0.01
    for net in (decayed, gained):
        ours = losses(family, net, name, steps, rate_over_gain=True)
        torch.testing.assert_close(ours, wanted, rtol=0, atol=TOLERANCES[name])


def test_lars_has_no_factor_and_a_resnet_is_refused():
    with raises_user_error("`rate_over_gain`", "lars"):
        Optimization(optimizer="lars", rate_over_gain=True)
    with raises_user_error("rate_over_gain", "ResNet"):
        Optimization(rate_over_gain=True).build(ResNet(8, 1, width=8, stem="cifar", pixels="unit"), 1e-3)


@pytest.mark.parametrize("rule", [partial(AdamW, betas=(0.9, 0.99)), partial(SGD, momentum=0.9)])
def test_scaled_rows_move_as_in_a_group_of_their_own(rule):
    """Weight decay, a schedule of the rate, and resumption included; the other rows are bitwise as without."""
    random = torch.Generator().manual_seed(0)
    start = torch.randn(6, 3, generator=random)
    factors = torch.tensor([1.0, 1.0, 0.3, 0.3, 1.0, 2.5], dtype=torch.float64)
    whole, unscaled = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    parts = [nn.Parameter(start[i : i + 1].clone()) for i in range(6)]
    groups = [{"params": [part], "lr": 0.01 * factor} for part, factor in zip(parts, factors.tolist(), strict=True)]
    optimizers = [rule([whole], 0.01, weight_decay=0.1), rule([unscaled], 0.01, weight_decay=0.1)]
    optimizers.append(rule(groups, 0.01, weight_decay=0.1))
    RowSteps(optimizers[0], [(whole, factors)])
    for step in range(8):
        gradient = torch.randn(6, 3, generator=random)
        for parameter in (whole, unscaled):
            parameter.grad = gradient.clone()
        for i, part in enumerate(parts):
            part.grad = gradient[i : i + 1].clone()
        for optimizer in optimizers:
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        if step == 3:
            optimizers[0].load_state_dict(optimizers[0].state_dict())
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-6, atol=1e-7)
    assert torch.equal(whole[factors == 1], unscaled[factors == 1])
    assert not torch.allclose(whole[5], unscaled[5], rtol=1e-3)


def test_scaled_rows_may_be_sharded(tmp_path):
    nets = [build("SiT").float() for _ in range(2)]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        shard(nets[1], init_device_mesh("cpu", (1,)))
        for net in nets:
            random = torch.Generator().manual_seed(3)
            optimizer = Optimization(rate_over_gain=True).build(net, 1e-3)
            for parameter in net.parameters():
                if parameter.requires_grad:
                    parameter.grad = shard_like(parameter, torch.randn(parameter.shape, generator=random))
            optimizer.step()
        for name, parameter in nets[1].named_parameters():
            assert torch.equal(full_tensor(parameter), nets[0].get_parameter(name)), name
    finally:
        torch.distributed.destroy_process_group()


def test_gates_start_at_zero_and_keep_the_form_of_the_optimizer():
    net = SiT(**SIZES, alpha_min=0.6)
    for rows in net.branch_factors():
        assert not net.get_parameter(f"{rows.module}.weight").any()
    plain, corrected = (Optimization(rate_over_gain=on).groups(net, 1.0) for on in (False, True))
    assert [len(group["params"]) for group in corrected] == [len(group["params"]) for group in plain]
