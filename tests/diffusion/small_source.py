"""A real small U-ViT with random weights, and the images that it makes."""

import torch

from uvit_decay.diffusion.noise_path import VP
from uvit_decay.diffusion.samplers import SAMPLERS
from uvit_decay.diffusion.sampling import DiffusionModel, generate
from uvit_decay.nn import UViT

CLASSES, SHAPE = 3, (2, 8, 8)
LABELS = [0, 1, 2, 2, 1, 0, CLASSES, 1, 2, 0]
PATH = VP()


def network(**options):
    """Return a U-ViT whose random output depends strongly on the image, the time and the label."""
    torch.manual_seed(0)
    sizes = dict(image_size=8, patch_size=4, channels=2, dim=32, depth=2, heads=2, num_classes=CLASSES)
    sizes["time_scale"] = 100.0  # at 999, untrained, it turns so fast with t that dopri5 takes 400 evaluations
    return UViT(**sizes | dict(alpha_min=0.7, zero_init=False, init="xavier") | options).eval().requires_grad_(False)


NET = network()


def counted():
    """Return NET, and the sizes of the batches that it is called with."""
    sizes = []

    def net(x, t, y):
        sizes.append(len(x))
        return NET(x, t, y)

    return net, sizes


def source(net=NET, prediction="eps", **changes):
    given = dict(path=PATH, shape=SHAPE, num_classes=CLASSES, null_label=True, device=torch.device("cpu"))
    return DiffusionModel(net, prediction=prediction, **given | changes)


def images(sampling, indices=range(10), labels=LABELS, seed=0, batch_size=10, of=None):
    of, batches = of or source(), range(0, len(indices), batch_size)
    shares = [(indices[i : i + batch_size], labels and labels[: len(indices)][i : i + batch_size]) for i in batches]
    return torch.cat([generate(of, sampling, *share, seed) for share in shares])


def few(name, count):
    """Return `count`, or 2 of a sampler that takes one image after the other."""
    return 2 if SAMPLERS[name].evaluations is None else count


def noise(n=5, seed=0):
    return torch.randn(n, *SHAPE, generator=torch.Generator().manual_seed(seed))


def times(*values):
    return torch.tensor(values)


T, Y = times(1.0, 0.8, 0.5, 0.1, 0.001), torch.tensor([0, 1, 2, CLASSES, 1])
