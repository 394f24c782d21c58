"""Scores of probes of every layer at every noise level, as a table and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtyping import Float64
from torch import Tensor

from uvit_decay.files.validation import write_json
from uvit_decay.files.writing import replacing
from uvit_decay.nn.intermediates import Layer
from uvit_decay.plots import heat_map
from uvit_decay.runs.history import PLACE, PROBE_REPORT, PROBE_TABLE

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
RANKS = ("spectrum_entropy", "effective_rank_exp")
TEST = "test_accuracy"
PROBES_PICTURE, CKNNA_PICTURE = "probes.png", "cknna.png"
BEST_ON_TEST = "best_on_test_accuracy"


@dataclass(frozen=True)
class LayerTable:
    """Scores of the layers of a network at noise levels: `scores[name]` is (levels, layers), float64.

    Args:
        layers: the layers by number: 0 the embeddings, i the output of block i.
        times: noise levels.
        scores: the scores by name.
        protocol: everything that the scores depend on except the weights, as plain values.
    """

    files = ()  # names of the files that `save` writes
    layers: Mapping[int, Layer]
    times: tuple[float, ...]
    scores: Mapping[str, Float64[Tensor, "levels layers"]]
    protocol: Mapping[str, Any]

    @classmethod
    def remove(cls, folder: Path) -> None:
        """Remove the files of an earlier measurement from a folder."""
        for name in cls.files:
            (folder / name).unlink(missing_ok=True)

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """The columns of the table, by name."""
        return self.scores

    def average(self, name: str, number: int) -> float:
        """Return the mean of a score of a layer over the noise levels."""
        column = list(self.layers).index(number)
        return float(self.scores[name][:, column].mean())

    def cells(self) -> list[dict[str, Any]]:
        """Return each grid point as plain values: its place, and its scores by name."""
        cells = []
        for level, t in enumerate(self.times):
            for column, (number, layer) in enumerate(self.layers.items()):
                cell: dict[str, Any] = {"layer": number, "name": layer.name, "kind": layer.kind, "t": t}
                for name, values in self.columns.items():
                    cell[name] = float(values[level, column])
                cells.append(cell)
        return cells

    def describe_network(self, weights: str) -> str:
        """Return the weights and the precision of the network as text."""
        network = f"{weights} weights"
        if "precision" in self.protocol:
            network += f" in {self.protocol['precision']}"
        return network

    def describe_images(self) -> str:
        """Return the noise levels and the noise of the images as text."""
        if not any(self.times):
            return "clean images"
        levels = ",".join(f"{t:g}" for t in self.times)
        return f"t of {levels}, {self.protocol['noise']}"

    def write(self, table: Path) -> None:
        """Write one line per grid point, below a line of names; scores have six digits."""
        cells = self.cells()
        lines = [",".join(cells[0])]
        for cell in cells:
            words = []
            for name, value in cell.items():
                words.append(str(value) if name in PLACE else f"{value:.6g}")
            lines.append(",".join(words))
        text = "\n".join(lines) + "\n"
        with replacing(table) as file:
            file.write(text.encode())

    def draw(self, path: Path, name: str, title: str, marked: tuple[int, int] | None = None) -> None:
        """Draw a score, times 100, with a frame around the grid point `marked`, (level, column), if any."""
        columns = [f"{t:g}" for t in self.times]
        x_label = "noise level t"
        if not any(self.times):
            columns = ["clean images"]
            x_label = ""
        heat_map(
            path,
            100 * self.scores[name].T,
            rows=[f"{number} {layer.name}" for number, layer in self.layers.items()],
            columns=columns,
            labels=(x_label, "features after"),
            title=title,
            marked=marked and marked[::-1],
        )


@dataclass(frozen=True)
class Grid(LayerTable):
    """Probe scores, means over noise draws, accuracies in [0, 1]; see also the arguments of `LayerTable`.

    The names are the protocol's: SCORES, or `test_accuracy` and perhaps `cknna`.

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

    Args:
        spread: standard deviations over the draws by name; empty for one draw.
        chosen_by: the score that chooses the best grid point. If it is `test_accuracy`, this is biased upwards.
    """

    files = (PROBE_TABLE, PROBE_REPORT, PROBES_PICTURE, CKNNA_PICTURE)
    spread: Mapping[str, Tensor] = field(default_factory=dict)
    chosen_by: str = "held_out_accuracy"

    @property
    def best_is_on_test(self) -> bool:
        """True if the best grid point is chosen by its accuracy on the test images."""
        return self.chosen_by == TEST

    def best(self, name: str | None = None) -> tuple[int, int]:
        """Return (level, column) of the best grid point, by a score or by `chosen_by`."""
        values = self.scores[name or self.chosen_by]
        return divmod(int(values.argmax()), len(self.layers))

    def average_layer(self, number: int) -> dict[str, float]:
        """Return accuracy, knn, the ranks and the share of the mean of a layer, averaged over noise levels."""
        names = {"accuracy": "test_accuracy", "knn": "knn_accuracy"}
        for name in self.scores:
            if name.startswith((*RANKS, "mean_share")):
                names[name] = name
        return {short: self.average(name, number) for short, name in names.items()}

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
        """Return the complete name of the best accuracy, one line: everything to be stated with the number."""
        protocol = self.protocol
        count = len(self.times) * len(self.layers)
        chosen_on = "the test images (best_on_test)" if self.best_is_on_test else "held-out training images"
        return (
            f"probe protocol {protocol['protocol']}, {self.describe_network(weights)}, pool {protocol['pool']}, "
            f"{self.describe_images()}, seed {protocol['seed']}, best of {count} grid points on {chosen_on}"
        )

    def _cell(self, level: int, column: int) -> dict[str, Any]:
        """Return the place of a grid point, its scores and their spread, as plain values."""
        return self.cells()[level * len(self.layers) + column]

    @property
    def columns(self) -> dict[str, Tensor]:
        """The scores by name, then their standard deviations, whose names end in `_std`."""
        return {**self.scores, **{f"{name}_std": values for name, values in self.spread.items()}}

    def text(self, weights: str) -> str:
        """Return the best grid points by accuracy and by CKNNA, in lines for people."""
        best = self.summary()
        where = f"{best['name']} at t = {best['t']:g}"
        lines = [self.number(weights)]
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
        return "\n".join(lines)

    def save(self, folder: Path, what: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Write probes.csv, probes.png, and cknna.png for alignments or remove it.

        Args:
            folder: folder of the files.
            what: name of the network or step that was probed, for titles.
            metadata: description of the network with its `weights`; writes probes.json, too.
        """
        self.write(folder / PROBE_TABLE)
        if metadata is not None:
            number = self.number(metadata["weights"])
            protocol = {**self.protocol, **metadata}
            report = {"number": number, "best": self.summary(), "protocol": protocol, "cells": self.cells()}
            write_json(folder / PROBE_REPORT, report)
        title = f"{what}: test accuracy in %, probe protocol {self.protocol['protocol']}"
        title += f"; framed: best on {'test' if self.best_is_on_test else 'held-out'} images"
        self.draw(folder / PROBES_PICTURE, TEST, title, self.best())
        if "cknna" in self.scores:
            about = self.protocol["reference"]
            settings = f"k {about['neighbours']}, {about['images']} images, times 100; framed: largest"
            title = f"CKNNA of {what} with {about['checkpoint']}, {settings}"
            self.draw(folder / CKNNA_PICTURE, "cknna", title, self.best("cknna"))
        else:
            (folder / CKNNA_PICTURE).unlink(missing_ok=True)


def _format_score(cell: Mapping[str, Any], name: str) -> str:
    """Return a score of a grid point, with its standard deviation over draws if there is one."""
    text = f"{cell[name]:.4f}"
    if f"{name}_std" in cell:
        text += f" +- {cell[f'{name}_std']:.4f}"
    return text
