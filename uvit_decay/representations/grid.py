"""Scores of probes of every layer at every noise level, as a table and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from uvit_decay.nn.intermediates import Layer
from uvit_decay.plots import heat_map
from uvit_decay.runtime.files import replacing
from uvit_decay.runtime.validation import write_json

SCORES = (
    *("held_out_accuracy", "test_accuracy", "best_on_test_accuracy", "l2"),
    *("knn_accuracy", "knn_centred_accuracy", "effective_rank", "dimensions", "mean_share"),
)
RANKS, OF_CLASS_TOKENS = ("effective_rank", "dimensions"), "_of_cls"  # the ending of ranks where there are any
TEST, BEST_ON_TEST = "test_accuracy", "best_on_test_accuracy"


@dataclass(frozen=True)
class Grid:
    """Probe scores: `scores[name]` is (levels, layers), float64, a mean over noise draws; accuracies lie in [0, 1].

    Names are those of a protocol: SCORES, or `test_accuracy` and perhaps `cknna`. `best_on_test_accuracy` uses the l2
    penalty that is best on the test set, as papers report it: it is biased upwards. `knn_centred_accuracy` takes
    cosines around the mean of the training features: others see mostly the mean where its share is large. The effective
    rank is the paper's, an entropy. `dimensions` is its exponential for features centred over the images: without
    centring, what all images have in common outweighs their differences. Both are of class tokens, as in the paper,
    where there are any, and then end in `_of_cls`; else of the pooled features, as `mean_share`, the share of their
    mean in the mean square.

    Args:
        layers: the layers by number: 0 the embeddings, i the output of block i.
        times: noise levels.
        scores: the scores by name.
        protocol: everything that they depend on except the weights, as plain values.
        spread: standard deviations over the draws by name; empty for one draw.
        chosen_by: the score that chooses the best cell. If it is `test_accuracy`, that cell's is biased upwards.
    """

    layers: Mapping[int, Layer]
    times: tuple[float, ...]
    scores: Mapping[str, Tensor]
    protocol: Mapping[str, Any]
    spread: Mapping[str, Tensor] = field(default_factory=dict)
    chosen_by: str = "held_out_accuracy"

    def best(self, name: str | None = None) -> tuple[int, int]:
        """Return (level, column) of the best cell, by a score or by `chosen_by`."""
        return divmod(int(self.scores[name or self.chosen_by].argmax()), len(self.layers))

    def tracked(self, number: int) -> dict[str, float]:
        """Return the scores of layer `number`, averaged over the noise levels."""
        column = list(self.layers).index(number)
        names = {"accuracy": "test_accuracy", "knn": "knn_accuracy"}
        names |= {name: name for name in self.scores if name.startswith((*RANKS, "mean_share"))}
        return {short: float(self.scores[name][:, column].mean()) for short, name in names.items()}

    def summary(self) -> dict[str, Any]:
        """Return the best cell, and the best test scores of all cells, as plain values.

        The test accuracy of a cell that was chosen by it is called `best_on_test_accuracy`.
        """
        best = self._cell(*self.best())
        if self.chosen_by == TEST:
            best = {name.replace(TEST, BEST_ON_TEST): value for name, value in best.items()}
        others = {f"best_{name}": self.scores[name] for name in ("knn_accuracy", "cknna") if name in self.scores}
        judged = {BEST_ON_TEST: self.scores.get(BEST_ON_TEST, self.scores[TEST]), **others}
        return {**best, **{f"{name}_of_all_cells": float(values.max()) for name, values in judged.items()}}

    def number(self, weights: str) -> str:
        """Return the name of the best cell's accuracy: all that must be said with the number, in a line."""
        of = self.protocol
        where = "held-out training images" if self.chosen_by != TEST else "the test images (best_on_test)"
        noise = f"t of {','.join(f'{t:g}' for t in self.times)}, {of['noise']}" if any(self.times) else "clean images"
        precision = f" in {of['precision']}" if "precision" in of else ""
        return (
            f"linear probe, protocol {of['protocol']}, {weights} weights{precision}, pool {of['pool']}, {noise}, "
            f"seed {of['seed']}, best of {len(self.times) * len(self.layers)} cells on {where}"
        )

    def _cell(self, level: int, column: int) -> dict[str, Any]:
        number, layer = list(self.layers.items())[column]
        place = {"layer": number, "name": layer.name, "kind": layer.kind, "t": self.times[level]}
        values = {name: float(values[level, column]) for name, values in self.scores.items()}
        return {**place, **values, **{f"{name}_std": float(s[level, column]) for name, s in self.spread.items()}}

    def text(self, weights: str) -> str:
        """Return the best cell, in lines for people."""
        best, lines = self.summary(), [self.number(weights)]
        where = f"{best['name']} at t = {best['t']:g}"
        if self.chosen_by == TEST:
            lines.append(f"best on test: {where}: {_with_spread(best, BEST_ON_TEST)}")
        else:
            lines.append(f"best cell: {where}: test accuracy {_with_spread(best, TEST)}")
            lines.append(f"best on test, as papers report it: {best['best_on_test_accuracy_of_all_cells']:.4f}")
        if "cknna" in self.scores:
            cell = self._cell(*self.best("cknna"))
            of = self.protocol["reference"]
            lines.append(f"CKNNA, k {of['neighbours']}, {of['images']} test images, with {of['checkpoint']}, largest:")
            lines.append(f"{cell['name']} at t = {cell['t']:g}: {_with_spread(cell, 'cknna')}")
        return "\n".join(lines)

    def save(self, folder: Path, what: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Write probes.csv, probes.png and, of alignments, cknna.png to `folder`; `what` was probed is in titles.

        With `metadata` of the network, of which `weights` is part, probes.json, too.
        """
        cells = [self._cell(level, column) for level in range(len(self.times)) for column in range(len(self.layers))]
        with replacing(folder / "probes.csv") as file:
            lines = [",".join(cells[0])]
            for cell in cells:
                place, values = list(cell.values())[:4], list(cell.values())[4:]
                lines.append(",".join((*map(str, place), *(f"{value:.6g}" for value in values))))
            file.write("".join(f"{line}\n" for line in lines).encode())
        if metadata is not None:
            report = {"number": self.number(metadata["weights"]), "best": self.summary()}
            protocol = {**self.protocol, **metadata}
            write_json(folder / "probes.json", {**report, "protocol": protocol, "cells": cells})
        by = "" if self.chosen_by != TEST else f" ({self.protocol['protocol']}; best on test framed)"
        self._heat_map(folder / "probes.png", TEST, self.best(), f"Linear probe{by} of {what}, test accuracy in %")
        if "cknna" in self.scores:
            of = self.protocol["reference"]
            title = f"CKNNA of {what} with {of['checkpoint']}, k {of['neighbours']}, {of['images']} images, times 100"
            self._heat_map(folder / "cknna.png", "cknna", self.best("cknna"), title)

    def _heat_map(self, path: Path, name: str, marked: tuple[int, int], title: str) -> None:
        clean = self.times == (0.0,)
        heat_map(
            path,
            100 * self.scores[name].T,
            rows=[f"{number} {layer.name}" for number, layer in self.layers.items()],
            columns=["clean images"] if clean else [f"{t:g}" for t in self.times],
            labels=("" if clean else "noise level t", "features after"),
            title=title,
            marked=marked[::-1],
        )


def _with_spread(cell: Mapping[str, Any], name: str) -> str:
    spread = f" +- {cell[f'{name}_std']:.4f}" if f"{name}_std" in cell else ""
    return f"{cell[name]:.4f}{spread}"
