"""Train a U-ViT with decayed shortcuts as a denoiser, in a plain torch loop: `python examples/torch_loop.py`."""

import argparse

import torch
from sklearn.datasets import load_digits

import uvit_decay
from uvit_decay.diffusion import VP, diffusion_loss


def main(steps: int) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # (n, 1, 8, 8) in [-1, 1]
    labels = torch.tensor(digits.target)

    net = uvit_decay.UViT(
        image_size=8, patch_size=2, channels=1, dim=64, depth=4, heads=2, num_classes=10, alpha_min=0.7, init="xavier"
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    path = VP()  # U-ViT's noise path: time 0 is the image, time 1 is noise

    for step in range(steps):
        chosen = torch.randint(len(images), (32,))
        x, y = images[chosen], labels[chosen]
        t = torch.rand(32)
        noise = torch.randn_like(x)
        loss = diffusion_loss(net, path, "eps", x, y, t, noise).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
