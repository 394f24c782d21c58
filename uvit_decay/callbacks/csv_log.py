"""metrics.csv, of which a kill costs at most the row that is being written."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch.loggers.csv_logs import CSVLogger, ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only

from uvit_decay.runtime.errors import explained
from uvit_decay.runtime.files import replacing
from uvit_decay.runtime.plain import read_text

LARGEST = 2**30  # bytes


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows, each with its step and the numbers that it has; none if there is no such file.

    Raises:
        UserError: the file is damaged, which half a line at its end is not.
    """
    whole_lines = read_text(path, LARGEST).rpartition("\n")[0] if path.exists() else ""
    with explained(f"{path} is damaged", ValueError, LookupError, csv.Error):
        for row in csv.DictReader(whole_lines.splitlines()):
            if None in row:
                raise ValueError(f"the row of step {row['step']} has more cells than the header")
            yield int(row["step"]), {name: value for name, value in row.items() if value and name != "step"}


class _Writer(ExperimentWriter):
    """Lightning's writer, which truncates the file when a number of a new name makes it rewrite the header."""

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        path, text = Path(self.metrics_file_path), io.StringIO(newline="")
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        writer = csv.DictWriter(text, fieldnames)
        writer.writeheader()
        writer.writerows(rows)
        with replacing(path) as file:
            file.write(text.getvalue().encode())


class MetricsLog(CSVLogger):
    """Lightning's CSVLogger with a header that is replaced atomically."""

    @rank_zero_only
    def begin(self) -> None:
        """Make the folder; a file that is there is removed."""
        self._fs.makedirs(self.root_dir, exist_ok=True)
        self._experiment = _Writer(self.log_dir)
