"""SiT-XL/2 with decayed shortcuts: one training step, its memory, and on a GPU images/s and model FLOP utilisation.

python benchmarks/sit_xl.py [--batch 1] [--steps 1] [--compile] [--peak-tflops 989]; bfloat16 autocast.
"""

import argparse
import resource
import statistics
import time
from contextlib import nullcontext

import torch
from torch.utils.flop_counter import FlopCounterMode

from uvit_decay.nn.sizes import create_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1, help="timed steps, after one that warms up")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--peak-tflops", type=float, help="of the device in bfloat16, for the utilisation; H200: 989")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = create_model("sit-xl/2", 0.8, num_classes=1000, wiring="decayed", checkpointing=options.checkpointing).to(
        device
    )
    x, t = torch.randn(options.batch, 4, 32, 32, device=device), torch.rand(options.batch, device=device)
    y = torch.randint(1000, (options.batch,), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = net(x, t, y).square().mean()
        loss.backward()
        net.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    counter = FlopCounterMode(display=False)
    seconds = []
    for number in range(options.steps + 1):
        with counter if number == 0 else nullcontext():
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        if number == 0 and options.compile:
            net.compile()
            step()
    rate = options.batch / statistics.median(seconds[1:])
    flops = counter.get_total_flops() / options.batch
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 1024 * resource.getrusage(0).ru_maxrss
    count = sum(parameter.numel() for parameter in net.parameters())
    print(f"{count:,} parameters, batch {options.batch} on {device.type}: {rate:.3g} images/s forward and backward")
    print(f"{flops / 1e9:.0f} GFLOP an image, {rate * flops / 1e12:.3g} TFLOP/s, peak memory {peak / 2**30:.1f} GiB")
    if options.peak_tflops:
        print(f"model FLOP utilisation {rate * flops / 1e12 / options.peak_tflops:.1%}")


if __name__ == "__main__":
    main()
