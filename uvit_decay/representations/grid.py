"""Scores of probes of every layer at every noise level, as a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from uvit_decay.nn.intermediates import Layer
from uvit_decay.plots import heat_map
from uvit_decay.runtime.files import replacing
from uvit_decay.runtime.plain import write_json

SCORES = (
    *("held_out_accuracy", "test_accuracy", "best_on_test_accuracy", "l2"),
    *("knn_accuracy", "effective_rank", "dimensions"),
)


@dataclass(frozen=True)
class Grid:
    """Probe scores: `scores[name]` is (levels, layers), float64, for each name in SCORES; accuracies lie in [0, 1].

    `best_on_test_accuracy` uses the l2 penalty that is best on the test set, as papers report it: it is biased
    upwards. The effective rank is the paper's, an entropy. `dimensions` is its exponential for features centred over
    the images: without centring, what all images have in common outweighs their differences. `layers` are the layers by
    number: 0 the embeddings, i the output of block i.
    """

    layers: Mapping[int, Layer]
    times: tuple[float, ...]
    scores: Mapping[str, Tensor]
    protocol: Mapping[str, Any]

    def best(self) -> tuple[int, int]:
        """Return (level, column) of the cell with the best accuracy on held-out training images."""
        return divmod(int(self.scores["held_out_accuracy"].argmax()), len(self.layers))

    def watched(self, number: int) -> dict[str, float]:
        """Return the scores of layer `number`, averaged over the noise levels."""
        column = list(self.layers).index(number)
        names = {"accuracy": "test_accuracy", "knn": "knn_accuracy"}
        names |= {name: name for name in ("effective_rank", "dimensions")}
        return {short: float(self.scores[name][:, column].mean()) for short, name in names.items()}

    def summary(self) -> dict[str, Any]:
        """Return the best cell, and the best test scores of all cells, as plain values."""
        level, column = self.best()
        number, layer = list(self.layers.items())[column]
        values = {name: float(self.scores[name][level, column]) for name in SCORES}
        return {
            "layer": number,
            "name": layer.name,
            "kind": layer.kind,
            "t": self.times[level],
            **values,
            "best_on_test_accuracy_of_all_cells": float(self.scores["best_on_test_accuracy"].max()),
            "best_knn_accuracy_of_all_cells": float(self.scores["knn_accuracy"].max()),
        }

    def _table(self) -> str:
        """Return the scores as CSV, a line for each cell."""
        lines = [",".join(("layer", "name", "kind", "t", *SCORES))]
        for level, t in enumerate(self.times):
            for column, (number, layer) in enumerate(self.layers.items()):
                values = (f"{float(self.scores[name][level, column]):.6g}" for name in SCORES)
                lines.append(",".join((str(number), layer.name, layer.kind, str(t), *values)))
        return "\n".join(lines) + "\n"

    def save(self, folder: Path, title: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Write probes.csv and probes.png to `folder`; with `metadata` of the network, probes.json, too."""
        with replacing(folder / "probes.csv") as file:
            file.write(self._table().encode())
        if metadata is not None:
            write_json(folder / "probes.json", {"best": self.summary(), "protocol": {**self.protocol, **metadata}})
        clean = self.times == (0.0,)
        heat_map(
            folder / "probes.png",
            100 * self.scores["test_accuracy"].T,
            rows=[f"{number} {layer.name}" for number, layer in self.layers.items()],
            columns=["clean images"] if clean else [f"{t:g}" for t in self.times],
            labels=("" if clean else "noise level t", "features after"),
            title=title,
            marked=self.best()[::-1],
        )
