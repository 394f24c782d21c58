"""What the decay costs: a decayed U-ViT against the ordinary one, the fused add against alpha * x + f, hooks on others.

python -m benchmarks.decay_cost [--threads 1] [--pairs 15]; prints median ratios of paired runs, after a warm-up.
"""

import argparse
from collections.abc import Callable

import torch
from diffusers import DiTTransformer2DModel
from torch import nn
from torchvision.models import resnet18

from benchmarks.measuring import Clock, Run, ratios
from uvit_decay.decay import attach, decayed_add
from uvit_decay.nn import UViT


def compare(name: str, a: Run, b: Run, pairs: int) -> None:
    """Print the median of a/b over pairs that run in turn, and the quartiles."""
    for run in (a, b, a, b):
        run()
    found = Clock(torch.device("cpu")).in_turn({"a": a, "b": b}, pairs)
    low, median, high = ratios(found["a"], found["b"])
    print(f"{name:58} {median:.3f}  (quartiles {low:.3f} to {high:.3f}, {pairs} pairs)")


def training_step(alpha_min: float) -> Callable[[], None]:
    torch.manual_seed(0)
    net = UViT(16, 2, 3, dim=256, depth=6, heads=4, alpha_min=alpha_min, zero_init=False)
    x, t = torch.randn(8, 3, 16, 16), torch.rand(8)

    def step() -> None:
        net.zero_grad()
        net(x, t).square().mean().backward()

    return step


def encoder_step(alpha_min: float) -> Callable[[], None]:
    """torch's own transformer, whose branches end in modules."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, norm_first=True, batch_first=True)
    net, x = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(4, 197, 384)
    attach(net, alpha_min)

    def step() -> None:
        net.zero_grad()
        net(x).square().mean().backward()

    return step


def dit_step(alpha_min: float) -> Callable[[], None]:
    """diffusers' DiT, whose branches have gates behind them."""
    torch.manual_seed(0)
    sizes = {"num_layers": 6, "sample_size": 32, "in_channels": 4, "out_channels": 4, "num_embeds_ada_norm": 10}
    net = DiTTransformer2DModel(num_attention_heads=6, attention_head_dim=64, **sizes)
    x, t, y = torch.randn(4, 4, 32, 32), torch.arange(4), torch.arange(4)
    attach(net, alpha_min)

    def step() -> None:
        net.zero_grad()
        net(x, timestep=t, class_labels=y).sample.square().mean().backward()

    return step


def resnet_step(alpha_min: float) -> Callable[[], None]:
    """torchvision's ResNet-18."""
    torch.manual_seed(0)
    net, x = resnet18(), torch.randn(4, 3, 128, 128)
    attach(net, alpha_min)

    def step() -> None:
        net.zero_grad()
        net(x).square().mean().backward()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x, f = torch.randn(128, 257, 512), torch.randn(128, 257, 512)
    compare("training step, alpha_min 0.7 / alpha_min 1", training_step(0.7), training_step(1.0), options.pairs)
    compare("attached encoder, the same", encoder_step(0.7), encoder_step(1.0), options.pairs)
    compare("attached DiT, the same", dit_step(0.7), dit_step(1.0), options.pairs)
    compare("attached ResNet-18, the same", resnet_step(0.7), resnet_step(1.0), options.pairs)
    compare("decayed_add(x, f, 0.7) / (x + f)", lambda: decayed_add(x, f, 0.7), lambda: x + f, options.pairs)
    compare(
        "decayed_add(x, f, 0.7) / (0.7 * x + f)", lambda: decayed_add(x, f, 0.7), lambda: 0.7 * x + f, options.pairs
    )


if __name__ == "__main__":
    main()
