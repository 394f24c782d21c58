"""metrics.csv, of which a kill costs at most the row that is being written."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from lightning.pytorch.loggers.csv_logs import CSVLogger, ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only

from uvit_decay.runtime.files import replacing


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
