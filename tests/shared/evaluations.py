"""Small evaluations, as a user starts them."""

import refusals
import torch
from conftest import run_script, trained_once
from sklearn.datasets import load_digits


def evaluate(monkeypatch, folder, *args):
    """Run `python evaluate.py ...` in this process, in `folder`, with a cache of its own there."""
    trained_once(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    run_script(monkeypatch, folder, "evaluate.py", *args)


def refused(monkeypatch, folder, capsys, *args) -> str:
    """Return the line with which the evaluation refuses its input."""
    return refusals.refused(capsys, evaluate, monkeypatch, folder, *args)


def digit_images(count: int, noise: float = 0.0) -> torch.Tensor:
    """Return the first digits, uint8 (n, 1, 8, 8), perhaps with noise."""
    pixels = torch.from_numpy(load_digits().images[:count] / 16 * 255).float()[:, None]
    blurred = pixels + noise * torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))
    return blurred.round().clamp(0, 255).to(torch.uint8)
