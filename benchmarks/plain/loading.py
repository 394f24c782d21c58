"""Data as the official codes read them: picture by picture, with PIL, torchvision's transforms and a DataLoader."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.datasets import ImageFolder


def crops(folder: Path, size: int, scale: tuple[float, float], batch_size: int) -> DataLoader:
    """Return the loader of MAE's pre-training."""
    steps = [
        transforms.RandomResizedCrop(size, scale, interpolation=transforms.InterpolationMode.BICUBIC),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(mean=[0.5] * 3, std=[0.5] * 3),
    ]
    return DataLoader(ImageFolder(str(folder), transforms.Compose(steps)), batch_size, shuffle=True, drop_last=True)


class Pictures(Dataset):
    """uint8 images (n, h, w, 3) in memory, as torchvision's CIFAR-10."""

    def __init__(self, images: np.ndarray, labels: list[int]) -> None:
        self.images, self.labels = images, labels
        steps = [transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]
        self.transform = transforms.Compose(steps)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


class Features(Dataset):
    """Moments (8, h, w) of U-ViT's feature files, one for each image and one for its mirror image."""

    def __init__(self, folder: Path, count: int, scale: float) -> None:
        self.folder, self.count, self.scale = folder, count, scale

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        side = random.randrange(2)
        moments, label = np.load(self.folder / f"{index}_{side}.npy", allow_pickle=True)
        mean, log_variance = torch.from_numpy(moments).chunk(2)
        return self.scale * (mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)), label


def write_feature(folder: Path, index: int, side: int, moments: np.ndarray, label: int) -> None:
    """Write one file as U-ViT's extraction does."""
    row = np.empty(2, dtype=object)
    row[:] = moments, label
    np.save(folder / f"{index}_{side}.npy", row)


def centre_crop(image: Image.Image, size: int) -> np.ndarray:
    """Return ADM's centre crop (size, size, 3): halved with BOX until below twice the size, then BICUBIC."""
    while min(*image.size) >= 2 * size:
        image = image.resize(tuple(side // 2 for side in image.size), resample=Image.BOX)
    scale = size / min(*image.size)
    image = image.resize(tuple(round(side * scale) for side in image.size), resample=Image.BICUBIC)
    pixels = np.array(image)
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return pixels[top : top + size, left : left + size]


@torch.no_grad()
def extract(images: Path, vae: nn.Module, size: int, batch_size: int, folder: Path, autocast: bool) -> None:
    """Encode images and their mirror images, and write a file for each."""

    def prepared(image: Image.Image) -> Tensor:
        return torch.from_numpy(centre_crop(image.convert("RGB"), size) / np.float32(127.5) - 1).permute(2, 0, 1)

    device, index = next(vae.parameters()).device, 0
    for batch, labels in DataLoader(ImageFolder(str(images), prepared), batch_size):
        for side, x in enumerate((batch, torch.flip(batch, dims=[-1]))):
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                posterior = vae.encode(x.to(device)).latent_dist
            moments = torch.cat([posterior.mean, posterior.logvar], dim=1).float().cpu().numpy()
            for row, (values, label) in enumerate(zip(moments, labels.tolist(), strict=True)):
                write_feature(folder, index + row, side, values, label)
        index += len(batch)
