"""Scores of probes of every layer at every noise level, as a table and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from uvit_decay.nn.intermediates import Layer
from uvit_decay.plots import heat_map
from uvit_decay.runs.history import PLACE, PROBE_REPORT, PROBE_TABLE
from uvit_decay.runtime.files import replacing
from uvit_decay.runtime.validation import write_json

SCORES = (
    "held_out_accuracy",
    "test_accuracy",
    "best_on_test_accuracy",
    "l2",
    "knn_accuracy",
    "knn_centred_accuracy",
    "spectrum_entropy",
    "effective_rank_exp",
    "mean_share",
)
NOISE_SCORES = ("noise_share", "within_variance", "between_variance")  # with --noise-draws
RANKS = ("spectrum_entropy", "effective_rank_exp")
TEST = "test_accuracy"
NOISE_SHARE = "noise_share"
PROBES_PICTURE, NOISE_SHARE_PICTURE, CKNNA_PICTURE = "probes.png", "noise_share.png", "cknna.png"
BEST_ON_TEST = "best_on_test_accuracy"


@dataclass(frozen=True)
class Grid:
    """Probe scores: `scores[name]` is (levels, layers), float64, a mean over noise draws; accuracies lie in [0, 1].

    The names are the protocol's: SCORES, or `test_accuracy` and perhaps `cknna`. NOISE_SCORES are added if the noise
    share was measured, and are the only ones of the protocol noise-share.

    - `best_on_test_accuracy` uses the l2 penalty that is best on the test set, as papers report it. It is biased
      upwards.
    - `knn_centred_accuracy` takes cosines around the mean of the training features. Uncentred cosines are dominated by
      the mean when its share is large.
    - `spectrum_entropy` is the paper's effective rank: an entropy, in nats, of features that are centred within each
      image, but not over the images. `effective_rank_exp` is the effective rank of Roy and Vetterli, the exponential of
      the entropy, of features that are centred over the images: without this centring, the common part of all images
      outweighs their differences. If the network has class tokens, both are computed from class tokens, as in the
      paper, and their names end in `_of_cls`. Otherwise they are computed from the pooled features.
    - `mean_share` is the share of the mean in the mean square of the pooled features.
    - `noise_share` is W / (W + B): W, `within_variance`, is the variance of an image's token states over its noise
      draws, and B, `between_variance`, the variance between images, see `noise_share` of this package.

    Args:
        layers: the layers by number: 0 the embeddings, i the output of block i.
        times: noise levels.
        scores: the scores by name.
        protocol: everything that the scores depend on except the weights, as plain values.
        spread: standard deviations over the draws by name; empty for one draw.
        chosen_by: the score that chooses the best grid point. If it is `test_accuracy`, this is biased upwards.
    """

    layers: Mapping[int, Layer]
    times: tuple[float, ...]
    scores: Mapping[str, Tensor]
    protocol: Mapping[str, Any]
    spread: Mapping[str, Tensor] = field(default_factory=dict)
    chosen_by: str = "held_out_accuracy"

    @property
    def classified(self) -> bool:
        """True if it has accuracies, unlike a grid of the protocol noise-share."""
        return TEST in self.scores

    @property
    def best_is_on_test(self) -> bool:
        """True if the best grid point is chosen by its accuracy on the test images."""
        return self.chosen_by == TEST

    def best(self, name: str | None = None) -> tuple[int, int]:
        """Return (level, column) of the best grid point, by a score or by `chosen_by`."""
        values = self.scores[name or self.chosen_by]
        return divmod(int(values.argmax()), len(self.layers))

    def average_layer(self, number: int) -> dict[str, float]:
        """Return accuracy, knn, the ranks and the shares of mean and noise of a layer, averaged over noise levels."""
        column = list(self.layers).index(number)
        names = {"accuracy": "test_accuracy", "knn": "knn_accuracy"}
        for name in self.scores:
            if name.startswith((*RANKS, "mean_share", NOISE_SHARE)):
                names[name] = name
        averages = {}
        for short, name in names.items():
            averages[short] = float(self.scores[name][:, column].mean())
        return averages

    def summary(self) -> dict[str, Any]:
        """Return the best grid point, and the best test scores of all grid points, as plain values.

        If the best grid point was chosen by its test accuracy, this accuracy is called `best_on_test_accuracy`.
        """
        summary = self._cell(*self.best())
        if self.best_is_on_test:
            summary = {name.replace(TEST, BEST_ON_TEST): value for name, value in summary.items()}
        best_on_test = self.scores.get(BEST_ON_TEST, self.scores[TEST])
        summary[f"{BEST_ON_TEST}_of_all_cells"] = float(best_on_test.max())
        for name in ("knn_accuracy", "cknna"):
            if name in self.scores:
                summary[f"best_{name}_of_all_cells"] = float(self.scores[name].max())
        return summary

    def number(self, weights: str) -> str:
        """Return the complete name of the best accuracy, one line: everything to be stated with the number.

        Without accuracies, the line describes the noise shares.
        """
        protocol = self.protocol
        network = f"{weights} weights"
        if "precision" in protocol:
            network += f" in {protocol['precision']}"
        images = "clean images"
        if any(self.times):
            levels = ",".join(f"{t:g}" for t in self.times)
            images = f"t of {levels}, {protocol['noise']}"
        if not self.classified:
            return f"noise share of token states, {network}, {images}, seed {protocol['seed']}"
        count = len(self.times) * len(self.layers)
        chosen_on = "the test images (best_on_test)" if self.best_is_on_test else "held-out training images"
        return (
            f"probe protocol {protocol['protocol']}, {network}, pool {protocol['pool']}, {images}, "
            f"seed {protocol['seed']}, best of {count} grid points on {chosen_on}"
        )

    def _cell(self, level: int, column: int) -> dict[str, Any]:
        """Return the place of a grid point, its scores and their spread, as plain values."""
        number = list(self.layers)[column]
        layer = self.layers[number]
        cell: dict[str, Any] = {
            "layer": number,
            "name": layer.name,
            "kind": layer.kind,
            "t": self.times[level],
        }
        for name, values in self.scores.items():
            cell[name] = float(values[level, column])
        for name, values in self.spread.items():
            cell[f"{name}_std"] = float(values[level, column])
        return cell

    def text(self, weights: str) -> str:
        """Return the best grid point and the noise shares, in lines for people."""
        lines = [self.number(weights)]
        if self.classified:
            lines += self._best_lines()
        if self.classified and NOISE_SHARE in self.scores:
            lines.append(f"noise share, {self._noise_size()}:")
        if NOISE_SHARE in self.scores:
            lines += self._noise_share_lines()
        return "\n".join(lines)

    def _best_lines(self) -> list[str]:
        """Return the best grid points by accuracy and by CKNNA, in lines for people."""
        best = self.summary()
        where = f"{best['name']} at t = {best['t']:g}"
        lines = []
        if self.best_is_on_test:
            lines.append(f"best on test: {where}: {_format_score(best, BEST_ON_TEST)}")
        else:
            lines.append(f"best grid point: {where}: test accuracy {_format_score(best, TEST)}")
            lines.append(f"best on test, as papers report it: {best['best_on_test_accuracy_of_all_cells']:.4f}")
        if "cknna" in self.scores:
            cell = self._cell(*self.best("cknna"))
            about = self.protocol["reference"]
            lines.append(
                f"CKNNA, k {about['neighbours']}, {about['images']} test images, with {about['checkpoint']}, largest:"
            )
            lines.append(f"{cell['name']} at t = {cell['t']:g}: {_format_score(cell, 'cknna')}")
        return lines

    def _noise_share_lines(self) -> list[str]:
        """Return the noise shares of the first, the last and the lowest layer at each noise level, for people."""
        names = [layer.name for layer in self.layers.values()]
        lines = []
        for t, shares in zip(self.times, self.scores[NOISE_SHARE], strict=True):
            lowest = int(shares.argmin())
            lines.append(
                f"t = {t:g}: {shares[0]:.3f} after {names[0]}, {shares[-1]:.3f} after {names[-1]}, lowest "
                f"{shares[lowest]:.3f} after {names[lowest]}"
            )
        return lines

    def _noise_size(self) -> str:
        """Return the images and draws of the noise share, in words."""
        about = self.protocol["noise_share"]
        return f"{about['images']} test images x {about['draws']} draws"

    def save(self, folder: Path, what: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Write probes.csv, probes.png unless there are no accuracies, and pictures of what else was measured.

        These are cknna.png for alignments and noise_share.png. Pictures of an earlier measurement are removed.

        Args:
            folder: folder of the files.
            what: name of the network or step that was probed, for titles.
            metadata: description of the network with its `weights`; writes probes.json, too.
        """
        cells = []
        for level in range(len(self.times)):
            for column in range(len(self.layers)):
                cells.append(self._cell(level, column))
        _write_csv(folder / PROBE_TABLE, cells)
        if metadata is not None:
            report: dict[str, Any] = {"number": self.number(metadata["weights"])}
            if self.classified:
                report["best"] = self.summary()
            report |= {"protocol": {**self.protocol, **metadata}, "cells": cells}
            write_json(folder / PROBE_REPORT, report)
        drawn = {
            PROBES_PICTURE: self.classified,
            NOISE_SHARE_PICTURE: NOISE_SHARE in self.scores,
            CKNNA_PICTURE: "cknna" in self.scores,
        }
        for name, is_drawn in drawn.items():
            if not is_drawn:
                (folder / name).unlink(missing_ok=True)
        if drawn[PROBES_PICTURE]:
            title = f"{what}: test accuracy in %, probe protocol {self.protocol['protocol']}"
            title += f"; framed: best on {'test' if self.best_is_on_test else 'held-out'} images"
            self._heat_map(folder / PROBES_PICTURE, TEST, title, self.best())
        if drawn[NOISE_SHARE_PICTURE]:
            title = f"{what}: noise share in %, {self._noise_size()}"
            self._heat_map(folder / NOISE_SHARE_PICTURE, NOISE_SHARE, title)
        if drawn[CKNNA_PICTURE]:
            about = self.protocol["reference"]
            settings = f"k {about['neighbours']}, {about['images']} images, times 100; framed: largest"
            title = f"CKNNA of {what} with {about['checkpoint']}, {settings}"
            self._heat_map(folder / CKNNA_PICTURE, "cknna", title, self.best("cknna"))

    def _heat_map(self, path: Path, name: str, title: str, marked: tuple[int, int] | None = None) -> None:
        """Draw a score, times 100, with a frame around the grid point `marked`, (level, column), if any."""
        rows = [f"{number} {layer.name}" for number, layer in self.layers.items()]
        if self.times == (0.0,):
            columns = ["clean images"]
            x_label = ""
        else:
            columns = [f"{t:g}" for t in self.times]
            x_label = "noise level t"
        heat_map(
            path,
            100 * self.scores[name].T,
            rows=rows,
            columns=columns,
            labels=(x_label, "features after"),
            title=title,
            marked=marked and marked[::-1],
        )


def _write_csv(path: Path, cells: list[dict[str, Any]]) -> None:
    """Write one line per grid point, below a line of names; scores have six digits."""
    lines = [",".join(cells[0])]
    for cell in cells:
        words = []
        for name, value in cell.items():
            words.append(str(value) if name in PLACE else f"{value:.6g}")
        lines.append(",".join(words))
    text = "\n".join(lines) + "\n"
    with replacing(path) as file:
        file.write(text.encode())


def _format_score(cell: Mapping[str, Any], name: str) -> str:
    """Return a score of a grid point, with its standard deviation over draws if there is one."""
    text = f"{cell[name]:.4f}"
    if f"{name}_std" in cell:
        text += f" +- {cell[f'{name}_std']:.4f}"
    return text
