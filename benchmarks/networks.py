"""The networks of the cases, ours and plain, with the same weights."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks import plain
from benchmarks.cases import Setting
from uvit_decay.nn import MAE, SiT, UViT
from uvit_decay.nn.sizes import create_model
from uvit_decay.tasks.parallel.compilation import compile_net


def plain_of(net: UViT | SiT | MAE) -> nn.Module:
    """Return the plain reference of a network, without its weights."""
    c = net.config
    size = c["patch_size"], c["channels"], c["dim"], c["depth"], c["heads"], c["alpha_min"]
    labels = c.get("num_classes", 0) and c["num_classes"] + c["null_label"]
    if isinstance(net, UViT):
        return plain.PlainUViT(c["image_size"], *size, labels)
    if isinstance(net, SiT):
        return plain.PlainSiT(c["image_size"], *size, labels)
    decoder = c["decoder_dim"], c["decoder_depth"], c["decoder_heads"]
    return plain.PlainMAE(c["image_size"], c["patch_size"], c["dim"], c["depth"], c["heads"], *decoder, c["alpha_min"])


def both(net: UViT | SiT | MAE, setting: Setting) -> tuple[nn.Module, nn.Module]:
    """Return the network and its plain reference with the same weights, on the device; no layer of them is silent."""
    torch.manual_seed(0)
    for parameter in net.parameters():
        if parameter.ndim > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    reference = plain_of(net)
    weights = {name: value for name, value in net.state_dict().items() if name not in ("alphas", "betas")}
    reference.load_state_dict(weights)
    return net.to(setting.device), reference.to(setting.device)


def compiled(net: nn.Module) -> nn.Module:
    """Compile a network in place, as `compile: true` of a task does."""
    compile_net(net, "inductor", by_block=next(net.parameters()).device.type == "cuda")
    return net


def uvit_s() -> UViT:
    return create_model("uvit-s/2", 0.7, image_size=32, channels=3)


def uvit_m() -> UViT:
    return create_model("uvit-m/2", 0.7, image_size=32, channels=4, num_classes=100)


def sit_xl(depth: int) -> SiT:
    sizes = {"image_size": 32, "patch_size": 2, "channels": 4, "dim": 1152, "depth": depth, "heads": 16}
    return SiT(**sizes, num_classes=1000, alpha_min=0.8, wiring="decayed")


def mae_b() -> MAE:
    return create_model("mae-b/16", 0.6, wiring="decayed")


def small(width: int, num_classes: int = 0) -> UViT:
    """Return the network of the digits, 17 tokens of width 64, or one of 65 tokens of width 128 or 192."""
    sizes = {64: (8, 2, 1, 64, 6, 2), 128: (16, 2, 3, 128, 6, 4), 192: (32, 4, 3, 192, 12, 6)}
    return UViT(*sizes[width], num_classes=num_classes, alpha_min=0.7, init="xavier")


def tiny_sit() -> SiT:
    return SiT(8, 2, 4, dim=64, depth=2, heads=2, num_classes=10, alpha_min=0.8, wiring="decayed")


def tiny_mae() -> MAE:
    sizes = dict(decoder_dim=48, decoder_depth=2, decoder_heads=3)
    return MAE(32, 8, 3, dim=64, depth=2, heads=2, alpha_min=0.6, wiring="decayed", **sizes)
