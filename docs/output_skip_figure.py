"""Draws the learned output skip of a checkpoint beside the coefficients of clean prediction.

python docs/output_skip_figure.py runs/NAME/version_0/checkpoints/last.ckpt output_skip.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from uvit_decay.checkpoint import Checkpoint, load
from uvit_decay.diffusion.prediction import target
from uvit_decay.nn.output_skip import Coefficients
from uvit_decay.terminal.errors import UserError, user_errors

STYLE = Path(__file__).with_name("figures.mplstyle")
EARLIEST = 0.05  # the coefficients of clean prediction grow without bound towards t = 0
TIMES = torch.linspace(EARLIEST, 1 - 1e-3, 200)


def learned_coefficients(checkpoint: Checkpoint, t: Tensor) -> Coefficients:
    """Return a(t) and b(t) of a network at times t (n,); raise a UserError if it has no output skip."""
    net = checkpoint.net
    if getattr(net, "output_skip", None) is None:
        raise UserError(f"this {type(net).__name__} has no output skip: train one with --model.net.output_skip learned")
    with torch.no_grad():
        return net.output_skip.coefficients(net.embed_time(t))


def clean_coefficients(checkpoint: Checkpoint, t: Tensor) -> Coefficients:
    """Return the a(t) and b(t) with which a network F that predicts the clean image x would give the same output.

    With eps = (x_t - alpha_t x) / sigma_t, every target is a linear function of x_t and x. On the linear path, where
    x_t = (1 - t) x + t eps, the velocity is here v = x - eps, as in SiT. So v = (x - x_t) / t, a = -1 / t and
    b = 1 / t. The coefficients are computed as the targets at (x_t, x) = (1, 0) and (0, 1).
    """
    path = checkpoint.path
    prediction = checkpoint.card.prediction
    if prediction == "score":
        raise UserError("this figure is for the predictions velocity, eps and x, not for score")
    one = torch.ones(len(t), 1, 1, 1)
    zero = torch.zeros_like(one)
    of_input = target(path, prediction, zero, path.eps_from_x(one, zero, t), t)
    of_output = target(path, prediction, one, path.eps_from_x(zero, one, t), t)
    return Coefficients(of_input.flatten(), of_output.flatten())


def draw(checkpoint: Checkpoint) -> Figure:
    """Return the figure: a(t) on the left, b(t) on the right."""
    learned = learned_coefficients(checkpoint, TIMES)
    clean = clean_coefficients(checkpoint, TIMES)
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    names = ("a(t), coefficient of the input", "b(t), coefficient of the network")
    for axes, name, ours, theirs in zip(figure.subplots(1, 2), names, learned, clean, strict=True):
        axes.plot(TIMES, ours, linewidth=1.8, label="learned")
        axes.plot(TIMES, theirs, linewidth=1.8, linestyle="--", label="clean prediction")
        axes.set(title=name, xlabel="t (1 = noise)")
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def main() -> None:
    """Write the figure of a checkpoint, of its EMA weights if it has them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path, help="the figure, such as output_skip.png")
    options = parser.parse_args()
    with user_errors(), matplotlib.rc_context(fname=STYLE):
        draw(load(options.checkpoint)).savefig(options.out)


if __name__ == "__main__":
    main()
