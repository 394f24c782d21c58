"""Probe every layer of a network that is not part of this package: `python examples/probe_own_network.py`.

The probes are logistic regressions, fitted for all layers at once. Their l2 penalty is chosen on held-out
training images.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from uvit_decay.representations import knn_accuracy, logistic_grid


class SmallConvNet(nn.Module):
    """A network of our own: three convolutions, here with random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3), nn.Conv2d(64, 64, 3)])

    def states(self, x: Tensor) -> list[Tensor]:
        """Return each layer's output, averaged over positions and zero-padded to 64 channels: (b, 64) per layer."""
        found = []
        for layer in self.layers:
            x = layer(x).relu()
            pooled = x.mean(dim=(2, 3))
            found.append(nn.functional.pad(pooled, (0, 64 - pooled.shape[1])))
        return found


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # (n, 1, 8, 8) in [-1, 1]
    labels = torch.tensor(digits.target)

    with torch.no_grad():
        features = torch.stack(SmallConvNet().states(images))  # (layers, images, channels)
    train, test = features[:, :1400], features[:, 1400:]
    scores = logistic_grid(train, labels[:1400], test, labels[1400:])
    neighbours = knn_accuracy(train, labels[:1400], test, labels[1400:])
    for layer, (linear, knn) in enumerate(zip(scores.test.tolist(), neighbours.tolist(), strict=True)):
        print(f"layer {layer}: linear probe {linear:.3f}, nearest neighbours {knn:.3f}")


if __name__ == "__main__":
    main()
